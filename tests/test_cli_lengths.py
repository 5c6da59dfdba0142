"""Layer 1: no processes. Reading lengths and timings from what people have."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from odc.cli.costs import make_training, read_timings
from odc.cli.lengths import read_lengths, token_counter

COUNT = token_counter(None, 4.0)


def read(source: Path | str, field: str | None = None) -> list[int]:
    return read_lengths(str(source), num_samples=50, field=field, count_tokens=COUNT).tolist()


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_one_integer_per_line(tmp_path: Path) -> None:
    assert read(write(tmp_path / "a.txt", "# tokens\n12\n\n 7 \n")) == [12, 7]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("3\n4\n"))
    assert read("-") == [3, 4]


def test_npy(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([5, 6], dtype=np.int32))
    assert read(tmp_path / "a.npy") == [5, 6]
    np.save(tmp_path / "floats.npy", np.array([5.0, np.nan]))
    with pytest.raises(
        ValueError, match=r"floats.npy has dtype float64: expected integers; save it with .astype\(int\)"
    ):
        read(tmp_path / "floats.npy")
    with pytest.raises(ValueError, match="cannot be read as an array"):
        read(write(tmp_path / "not.npy", "12"))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="cannot be read as an array"):
        read(tmp_path / "objects.npy")


@pytest.mark.parametrize(
    ("records", "field", "lengths"),
    [
        ([{"length": 3}, {"length": 9}], None, [3, 9]),
        ([{"text": "x", "num_tokens": 8}], None, [8]),
        ([{"input_ids": [1, 2, 3], "labels": [1]}], None, [3]),
        ([{"id": 1, "text": "twelve chars"}], None, [3]),
        ([{"answer": "twelve chars", "length": 99}], "answer", [3]),
        ([{"text": ""}], None, [1]),
    ],
)
def test_jsonl(tmp_path: Path, records: list[dict[str, object]], field: str | None, lengths: list[int]) -> None:
    lines = "\n".join(map(json.dumps, records)) + "\n\n"
    assert read(write(tmp_path / "a.jsonl", lines), field) == lengths


@pytest.mark.parametrize(
    ("line", "field", "message"),
    [
        ("{", None, "line 1 is not JSON"),
        ("[1]", None, "line 1 holds a list: expected an object"),
        ('{"id": 1}', None, "line 1 has the fields 'id': none of them is known.*--field"),
        ('{"id": 1}', "text", "line 1 has no field 'text', only 'id'"),
        ('{"length": 1.5}', None, "field 'length' is 1.5: expected an integer, a list of tokens, or text"),
        ('{"length": true}', None, "field 'length' is True"),
        ("[" * 100_000, None, "line 1 is not JSON"),
        ('{"length": 1' + "0" * 30 + "}", None, "line 1, field 'length' is 1000.*at most 1,000,000,000,000"),
        ('{"length": 0}', None, "line 1, field 'length' is 0: expected a length of at least 1"),
        ('{"length": -4}', None, "line 1, field 'length' is -4: expected a length of at least 1"),
    ],
)
def test_bad_jsonl(tmp_path: Path, line: str, field: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "a.jsonl", line), field)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 2: '1.5' is not an integer"):
        read(write(tmp_path / "a.txt", "4\n1.5\n"))
    with pytest.raises(ValueError, match="holds no lengths"):
        read(write(tmp_path / "empty.txt", "\n"))
    with pytest.raises(ValueError, match="neither a file nor a length law: laws are longalign, swesmith, aime"):
        read("long-align")
    with pytest.raises(ValueError, match="is a folder"):
        read(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="line 1 is not text"):
        read(tmp_path / "binary")
    with pytest.raises(ValueError, match="line 3 is 0: expected a length of at least 1"):
        read(write(tmp_path / "zero.txt", "4\n5\n0\n"))
    with pytest.raises(ValueError, match="line 2 is 1000.*at most"):
        read(write(tmp_path / "large.txt", f"4\n{10**30}\n"))
    with pytest.raises(ValueError, match=r"a.json is one JSON document: expected .jsonl"):
        read(write(tmp_path / "a.json", "[4]"))


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.txt"):
        first = b'{"text": "abc"}' if name == "a.jsonl" else b"3"
        (tmp_path / name).write_bytes(first + b"\n\n\xe9\n")
        with pytest.raises(ValueError, match=f"{name}, line 3 is not text in UTF-8"):
            read(tmp_path / name)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    for name, text in (("a.txt", "7\n8\n"), ("a.jsonl", '{"length": 7}\n{"length": 8}\n')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert read(tmp_path / name) == [7, 8]
    (tmp_path / "t.csv").write_bytes(b"\xef\xbb\xbf10,1.0\n20,2.0\n")
    assert read_timings(tmp_path / "t.csv") == ([10, 20], [1.0, 2.0])


def test_a_law_by_name() -> None:
    lengths = read("swesmith")
    assert len(lengths) == 50
    assert min(lengths) > 11_000


def test_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is an optional package")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert token_counter(tmp_path / "tokenizer.json", 4.0)("a b a c") == 4
    with pytest.raises(ValueError, match="cannot be read as a tokenizer.json"):
        token_counter(write(tmp_path / "bad.json", "{}"), 4.0)


def test_timings(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "length,seconds\n1000,0.5\n\n2000,1.25\n")
    assert read_timings(path) == ([1000, 2000], [0.5, 1.25])
    with pytest.raises(ValueError, match=r"line 2: '5' is not 'length,seconds'"):
        read_timings(write(tmp_path / "short.csv", "10,1.0\n5\n"))
    with pytest.raises(ValueError, match="finite"):
        read_timings(write(tmp_path / "nan.csv", "10,nan\n"))
    with pytest.raises(ValueError, match="there is no file"):
        read_timings(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"10,1.0\n\xff,2\n")
    with pytest.raises(ValueError, match="is not text"):
        read_timings(tmp_path / "binary.csv")


def test_timings_skip_names_only(tmp_path: Path) -> None:
    assert read_timings(write(tmp_path / "a.csv", "1e3,0.5\n2000.0,1\n")) == ([1000, 2000], [0.5, 1.0])
    with pytest.raises(ValueError, match=r"line 1: the length is 1.5, expected an integer"):
        read_timings(write(tmp_path / "b.csv", "1.5,0.5\n2000,1\n"))
    with pytest.raises(ValueError, match=r"line 1: '100,fast' is not 'length,seconds'"):
        read_timings(write(tmp_path / "c.csv", "100,fast\n2000,1\n"))


def test_costs_of_a_model_on_a_device() -> None:
    training = make_training("qwen2.5-7b", "h100", 0.5, 8, recompute=True, timings=None)
    # About 6 FLOPs per parameter and token, without the embedding that only looks up.
    seconds = float(training.cost([1000])[0])
    assert seconds == pytest.approx(6 * 7.1e9 * 1000 / (0.5 * 989e12), rel=0.03)
    most = training.most_tokens()
    assert training.memory_bytes(most) <= training.device.memory_bytes < training.memory_bytes(most + 1)
    assert make_training("qwen2.5-72b", "a100", 0.5, 1, recompute=True, timings=None).most_tokens() == 0


def test_costs_fitted_to_timings(tmp_path: Path) -> None:
    rows = [f"{s},{1e-9 * s * s + 2e-5 * s + 0.25}" for s in (500, 1000, 4000, 16000)]
    path = write(tmp_path / "t.csv", "\n".join(rows))
    training = make_training("qwen2.5-7b", "h100", 0.4, 8, recompute=True, timings=path)
    assert training.microbatch_s == pytest.approx(0.25)
    assert float(training.cost([10_000])[0]) == pytest.approx(0.3)
    assert "4 measurements" in training.about
