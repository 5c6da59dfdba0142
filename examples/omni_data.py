"""Training samples of text, images and sound, made on the spot: no files, nothing downloaded.

    python examples/omni_data.py --num-samples 1000     # what the samples are made of

Six tasks, mixed at random, so that a sample's length in one modality says little about that in another ("modality
composition incoherence", OrchMLLM section 3.1): text alone, captions of an image, questions about several images,
transcripts (as long as the sound), questions asked by voice (long sound, short answer), images with a spoken question.

Text is the standard library's own source (``stdlib_text.py``), a token per byte. Images are shapes on a gradient, and
captions name them. "Speech" is a sweep through one tone per byte, so a transcript can be learned.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from stdlib_text import stdlib_pairs

IGNORED = -100  # label of a token without loss

# A byte is its own token.
END, IMAGE_START, IMAGE, IMAGE_END, AUDIO_START, AUDIO, AUDIO_END, VIDEO = range(256, 264)
VOCAB_SIZE = 264

PATCH_SIZE = 4  # pixels
MERGE_SIZE = 2  # patches per side that become one token
TEMPORAL_PATCH_SIZE = 2  # frames; an image is repeated
MIN_GRID, MAX_GRID = 6, 40  # patches per side

SAMPLE_RATE = 16_000
HOP, FFT_SIZE = 160, 400  # 10 ms, 25 ms
NUM_MELS = 64
FRAMES_PER_BYTE = 4  # which the audio encoder makes one token of
MAX_SPOKEN = 400  # bytes; 16 seconds

MAX_PROMPT, MAX_ANSWER = 160, 640  # bytes
NUM_PAIRS = 512  # of the standard library's text that samples are made from

COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.7, 0.2),
    "blue": (0.1, 0.2, 0.9),
    "yellow": (0.9, 0.9, 0.1),
    "white": (1.0, 1.0, 1.0),
    "black": (0.0, 0.0, 0.0),
}
SHAPES = ("circle", "square", "bar")
TASKS = {
    "text": 0.25,
    "caption": 0.2,
    "images": 0.1,
    "transcript": 0.2,
    "spoken question": 0.15,
    "image and voice": 0.1,
}
"""Their shares of the samples."""


class Picture(NamedTuple):
    """What an image shows."""

    grid: tuple[int, int]
    """Height and width in patches, each a multiple of ``MERGE_SIZE``."""

    colours: tuple[str, str]
    """Of the gradient, from the top left to the bottom right."""

    shapes: tuple[tuple[str, str], ...]
    """(colour, shape)."""

    def describe(self) -> str:
        shown = " and ".join(f"a {colour} {shape}" for colour, shape in self.shapes)
        return f"{shown[0].upper()}{shown[1:]} on a gradient from {self.colours[0]} to {self.colours[1]}."


class Speech(NamedTuple):
    """What a clip of audio says."""

    spoken: bytes


class Image(NamedTuple):
    """An image as the vision encoder takes it."""

    patches: torch.Tensor
    """(num_patches, 3 * TEMPORAL_PATCH_SIZE * PATCH_SIZE**2) float32; the four of a token stand together."""

    grid_thw: torch.Tensor
    """(3,) int64: frames (1), height and width in patches."""


class ItemLengths(NamedTuple):
    """Of an image or a clip of audio."""

    encoder: int
    """Patches or mel frames: what the encoder's time depends on."""

    output: int
    """Tokens of the sequence that it becomes."""


class SampleLengths(NamedTuple):
    """What a sample costs in each phase."""

    length: int
    """Tokens of the whole interleaved sequence."""

    items: dict[str, list[ItemLengths]]
    """"image" and "audio": its items in their order."""


@dataclass(frozen=True)
class Recipe:
    """A sample before anything is drawn."""

    task: str
    prompt: tuple[bytes | Picture | Speech, ...]
    answer: bytes


@dataclass(frozen=True)
class Sample:
    """One training sample."""

    task: str
    sequence: torch.Tensor
    """(length, 5) int64, a row per token: token, label (``IGNORED`` for all but the answer; not shifted), and its place
    in time, height and width (multimodal rotary embedding). Items are rows of placeholders."""

    images: tuple[Image, ...]
    audio: tuple[torch.Tensor, ...]
    """Log-mel features, (NUM_MELS, num_frames) float32."""


def image_lengths(height: int, width: int) -> ItemLengths:
    """Of an image of so many patches."""
    return ItemLengths(height * width, height * width // MERGE_SIZE**2)


def audio_lengths(num_frames: int) -> ItemLengths:
    """Of a clip of so many mel frames: a convolution and a pooling halve them, first up, then down."""
    return ItemLengths(num_frames, (num_frames + 1) // 2 // 2)


def lengths(sample: Sample | Recipe) -> SampleLengths:
    """What a sample costs in each phase, from its shapes; the same of a sample and of its recipe."""
    if isinstance(sample, Sample):
        images = [image_lengths(*image.grid_thw[1:].tolist()) for image in sample.images]
        clips = [audio_lengths(features.shape[1]) for features in sample.audio]
        return SampleLengths(len(sample.sequence), {"image": images, "audio": clips})
    items: dict[str, list[ItemLengths]] = {"image": [], "audio": []}
    length = len(sample.answer) + 1
    for part in sample.prompt:
        if isinstance(part, bytes):
            length += len(part)
            continue
        item = image_lengths(*part.grid) if isinstance(part, Picture) else audio_lengths(num_frames(part))
        items["image" if isinstance(part, Picture) else "audio"].append(item)
        length += item.output + 2
    return SampleLengths(length, items)


def num_frames(speech: Speech) -> int:
    return FRAMES_PER_BYTE * len(speech.spoken)


class OmniDataset(Sequence[Sample]):
    """Samples by index. Sample i is the same on every rank (with one version of Python), however many there are."""

    def __init__(self, num_samples: int, seed: int = 0, tasks: Mapping[str, float] = TASKS) -> None:
        if unknown := set(tasks) - set(TASKS):
            raise ValueError(f"tasks={dict(tasks)}: {sorted(unknown)} not known: expected some of {list(TASKS)}")
        self.num_samples, self.seed = num_samples, seed
        self._pairs = [(p.prompt.encode(), p.answer.encode()) for p in stdlib_pairs(NUM_PAIRS, seed)]
        self._tasks = list(tasks)
        self._shares = np.array(list(tasks.values())) / sum(tasks.values())

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]  # no slices
        return render(self.recipe(index))

    def lengths(self, index: int) -> SampleLengths:
        """Those of ``self[index]``, which is not drawn for that."""
        return lengths(self.recipe(index))

    def recipe(self, index: int) -> Recipe:
        """What ``self[index]`` is made of."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"index {index}: there are {self.num_samples} samples")
        generator = np.random.default_rng((self.seed, index))
        task = self._tasks[generator.choice(len(self._tasks), p=self._shares)]
        prompt, text = self._pairs[generator.integers(len(self._pairs))]
        return _recipe(task, prompt[:MAX_PROMPT], text, generator)


def _recipe(task: str, prompt: bytes, text: bytes, generator: np.random.Generator) -> Recipe:
    if task == "text":
        return Recipe(task, (prompt,), text[: _long_tailed(generator, 120, MAX_ANSWER)])
    if task == "caption":
        picture = _picture(generator, MAX_GRID)
        return Recipe(task, (picture, b"Describe it.\n"), picture.describe().encode())
    if task == "images":
        pictures = [_picture(generator, MAX_GRID // 2) for _ in range(generator.integers(2, 5))]
        chosen = int(generator.integers(len(pictures)))
        question = f"What does image {chosen + 1} show?\n".encode()
        return Recipe(task, (*pictures, question), pictures[chosen].describe().encode())
    spoken = text[: _long_tailed(generator, 100, MAX_SPOKEN)]
    if task == "transcript":
        return Recipe(task, (b"Write it down.\n", Speech(spoken)), spoken)
    answer = b"yes" if b"return" in spoken else b"no"
    if task == "spoken question":
        return Recipe(task, (Speech(spoken), b"Is something returned?\n"), answer)
    picture = _picture(generator, MAX_GRID)
    return Recipe(task, (picture, b"Listen: ", Speech(spoken), b"\n"), picture.describe().encode() + b" " + answer)


def _long_tailed(generator: np.random.Generator, median: int, most: int) -> int:
    return int(np.clip(median * np.exp(generator.normal(0, 0.9)), 8, most))


def _picture(generator: np.random.Generator, max_grid: int) -> Picture:
    """Sides of ``MIN_GRID`` to ``max_grid`` patches, each doubling as likely."""
    sides = np.exp(generator.uniform(np.log(MIN_GRID), np.log(max_grid + 1), 2)) // MERGE_SIZE * MERGE_SIZE
    names = list(COLOURS)
    first, last, *others = (names[i] for i in generator.permutation(len(names))[: 2 + generator.integers(1, 4)])
    shapes = tuple((colour, SHAPES[generator.integers(len(SHAPES))]) for colour in others)
    return Picture((int(sides[0]), int(sides[1])), (first, last), shapes)


def render(recipe: Recipe) -> Sample:
    """Draw, speak and tokenize."""
    pictures = [part for part in recipe.prompt if isinstance(part, Picture)]
    clips = [part for part in recipe.prompt if isinstance(part, Speech)]
    images = tuple(patchify(draw(picture)) for picture in pictures)
    return Sample(recipe.task, _sequence(recipe), images, tuple(log_mel(speak(clip.spoken)) for clip in clips))


def _sequence(recipe: Recipe) -> torch.Tensor:
    """Tokens, labels and places. Each token of text or audio is one further in all three; an image is at one time, and
    what follows it is beyond its longer side."""
    columns: list[torch.Tensor] = []
    start = 0
    for tokens, grid in _runs(recipe):
        if grid is None:
            positions = torch.arange(len(tokens)).expand(3, -1)
            size = len(tokens)
        else:
            height, width = grid
            rows, places = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
            positions, size = torch.stack([torch.zeros_like(rows), rows, places]), max(grid)
        ids = torch.tensor(tokens)
        columns.append(torch.stack([ids, torch.full_like(ids, IGNORED), *(positions + start)], dim=1))
        start += size
    answered = columns[-1]
    answered[:, 1] = answered[:, 0]
    return torch.cat(columns)


def _runs(recipe: Recipe) -> Iterator[tuple[list[int], tuple[int, int] | None]]:
    """Tokens, and for an image the height and width of its tokens; the answer comes last."""
    for part in recipe.prompt:
        if isinstance(part, bytes):
            yield list(part), None
        elif isinstance(part, Picture):
            height, width = (side // MERGE_SIZE for side in part.grid)
            yield [IMAGE_START], None
            yield [IMAGE] * (height * width), (height, width)
            yield [IMAGE_END], None
        else:
            output = audio_lengths(num_frames(part)).output
            yield [AUDIO_START, *[AUDIO] * output, AUDIO_END], None
    yield [*recipe.answer, END], None


def draw(picture: Picture) -> torch.Tensor:
    """Pixels, (3, height, width) float32 from -1 to 1."""
    height, width = (side * PATCH_SIZE for side in picture.grid)
    y, x = torch.meshgrid(torch.linspace(0, 1, height), torch.linspace(0, 1, width), indexing="ij")
    first, last = (torch.tensor(COLOURS[name])[:, None, None] for name in picture.colours)
    pixels = first + (last - first) * (x + y) / 2
    for i, (colour, shape) in enumerate(picture.shapes):
        across, down = (x * len(picture.shapes) - i - 0.5).abs(), (y - 0.5).abs()  # side by side
        inside = {
            "circle": across**2 + down**2 < 0.3**2,
            "square": (across < 0.3) & (down < 0.3),
            "bar": (across < 0.1) & (down < 0.4),
        }[shape]
        pixels = torch.where(inside, torch.tensor(COLOURS[colour])[:, None, None], pixels)
    return 2 * pixels - 1


def patchify(pixels: torch.Tensor) -> Image:
    """Cut (3, height, width) into patches, in the order that the vision encoder expects: token by token.

    Raises:
        ValueError: a side is no multiple of a token's.
    """
    side = PATCH_SIZE * MERGE_SIZE
    _, height, width = pixels.shape
    if height % side or width % side:
        raise ValueError(f"an image of {height} x {width} pixels: expected sides that are multiples of {side}")
    rows, columns = height // side, width // side
    blocks = pixels.reshape(3, rows, MERGE_SIZE, PATCH_SIZE, columns, MERGE_SIZE, PATCH_SIZE)
    patches = blocks.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, 1, PATCH_SIZE, PATCH_SIZE)
    patches = patches.expand(-1, -1, TEMPORAL_PATCH_SIZE, -1, -1).flatten(1)
    return Image(patches, torch.tensor([1, rows * MERGE_SIZE, columns * MERGE_SIZE]))


def speak(spoken: bytes) -> torch.Tensor:
    """Sound, (num_samples,) float32: a sweep through a tone of each byte, FRAMES_PER_BYTE * HOP samples apart."""
    tones = 200.0 * (7000.0 / 200.0) ** (np.frombuffer(spoken, dtype=np.uint8) / 255.0)
    places = np.arange(len(spoken) * FRAMES_PER_BYTE * HOP) / (FRAMES_PER_BYTE * HOP)
    frequency = np.interp(places, np.arange(len(spoken)), tones)
    return torch.from_numpy(np.sin(2 * np.pi * np.cumsum(frequency) / SAMPLE_RATE).astype(np.float32))


def log_mel(sound: torch.Tensor) -> torch.Tensor:
    """Log-mel features as Whisper's: (NUM_MELS, num_samples // HOP) float32."""
    window = torch.hann_window(FFT_SIZE)
    spectrum = torch.stft(sound, FFT_SIZE, HOP, window=window, return_complex=True)[:, :-1].abs() ** 2
    features = (_mel_filters() @ spectrum).clamp(min=1e-10).log10()
    return (features.clamp(min=float(features.max()) - 8.0) + 4.0) / 4.0


@functools.cache
def _mel_filters() -> torch.Tensor:
    """(NUM_MELS, FFT_SIZE // 2 + 1): triangles, equally spaced in mel."""
    highest = 2595.0 * np.log10(1.0 + SAMPLE_RATE / 2 / 700.0)
    edges = 700.0 * (10.0 ** (np.linspace(0, highest, NUM_MELS + 2) / 2595.0) - 1.0)
    frequencies = np.linspace(0, SAMPLE_RATE / 2, FFT_SIZE // 2 + 1)
    rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
    return torch.from_numpy(np.maximum(0.0, np.minimum(rising, falling)).astype(np.float32))


def dummy_image() -> Image:
    """The smallest image: one token. For a rank that has none, where all ranks must run the encoder."""
    return patchify(torch.zeros(3, PATCH_SIZE * MERGE_SIZE, PATCH_SIZE * MERGE_SIZE))


def dummy_audio() -> torch.Tensor:
    """The shortest clip that gives a token: 3 frames, (NUM_MELS, 3)."""
    return torch.zeros(NUM_MELS, 3)


def dummy_sequence() -> torch.Tensor:
    """The shortest sequence, without loss: (1, 5)."""
    return torch.tensor([[END, IGNORED, 0, 0, 0]])


def describe(dataset: OmniDataset) -> str:
    """How much there is of what: a line per modality and one of the tasks."""
    found = [dataset.recipe(i) for i in range(len(dataset))]
    measured = [lengths(recipe) for recipe in found]
    lines = [", ".join(f"{number} {task}" for task, number in Counter(recipe.task for recipe in found).most_common())]
    columns = {"tokens per sample": [m.length for m in measured]}
    for modality, unit in (("image", "patches per image"), ("audio", "frames per clip")):
        columns[unit] = [item.encoder for m in measured for item in m.items[modality]]
        columns[f"{modality} tokens of 100"] = [
            100 * sum(item.output for item in m.items[modality]) // m.length for m in measured
        ]
    for name, values in columns.items():
        low, median, p90, high = np.percentile(values, [0, 50, 90, 100])
        lines.append(
            f"{name}: {len(values)}, min {low:.0f}, median {median:.0f}, 90th percentile {p90:.0f}, max {high:.0f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Describe the samples that the multimodal example trains on.")
    parser.add_argument("--num-samples", type=int, default=1000, help="how many (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: 0)")
    args = parser.parse_args()
    print(describe(OmniDataset(args.num_samples, args.seed)))


if __name__ == "__main__":
    main()
