"""Layer 1: no processes. Reading lengths and timings from what people have."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
import pickle
import sys
import tempfile
import threading
import types
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc.cli import lengths as cli_lengths
from odc.cli.costs import make_training, read_timings
from odc.cli.lengths import Lengths, read_lengths
from odc.cli.records import RecordReader, TokenCounter

COUNT = TokenCounter(None, 4.0)


def read_all(source: Path | str, *fields: str) -> Lengths:
    return read_lengths(str(source), RecordReader(fields, COUNT), num_samples=50)


def read(source: Path | str, *fields: str | None) -> list[int]:
    return read_all(source, *(field for field in fields if field)).tokens.tolist()


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


def header(shape: str, descr: str = "'<i8'") -> bytes:
    """Of a .npy file, with any claim."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@settings(deadline=None, max_examples=120)
@given(st.data())
def test_a_damaged_npy_is_read_or_refused(data: st.DataObject) -> None:
    whole = header("(3,)") + b"".join(n.to_bytes(8, "little") for n in (5, 6, 7))
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for at, byte in data.draw(st.lists(st.tuples(st.integers(0, len(whole)), st.integers(0, 255)), max_size=3)):
        damaged[at : at + 1] = bytes([byte])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.npy"
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read(path)


# What does not end


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/urandom", "/dev/null"])
def test_devices_are_no_files(path: str, tmp_path: Path) -> None:
    names = ("a.npy", "a.jsonl", "config.json")
    for name in names:
        (tmp_path / name).symlink_to(path)
    train = partial(make_training, device="h100", mfu=0.5, world_size=8, recompute=True, timings=None)
    for ask in (
        partial(read, path),
        *(partial(read, tmp_path / name) for name in names),
        partial(read_timings, Path(path)),
        partial(train, path),
        partial(train, str(tmp_path)),
    ):
        with pytest.raises(ValueError, match="is a device or a socket: expected a file"):
            ask()
    with pytest.raises(ValueError, match="is no file: expected a tokenizer.json"):
        TokenCounter(Path(path), 4.0)


def test_a_line_without_an_end_is_read_no_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_lengths, "_LONGEST_LINE", 100)
    monkeypatch.setattr(cli_lengths, "_LONGEST_OBJECT", 1000)
    with open("/dev/zero") as zeros, monkeypatch.context() as patch:
        patch.setattr("sys.stdin", zeros)
        with pytest.raises(ValueError, match=r"line 1 starts with '\\x00.* and is longer than 100 characters"):
            read("-")
    for name, length in (("a.txt", 101), ("a.jsonl", 1001)):
        with pytest.raises(ValueError, match=f"line 2 starts with.*is longer than {length - 1:,} characters"):
            read(write(tmp_path / name, ("\n" if name == "a.txt" else '{"length": 1}\n') + "1" * length))
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=lambda: path.write_text("5\n6\n"))
    writer.start()
    assert read(path) == [5, 6]  # as of a shell's <(...)
    writer.join()


def test_more_lengths_than_memory_should_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_lengths, "MOST_SAMPLES", 3)
    endless = types.SimpleNamespace(readline=lambda limit: "7\n")
    monkeypatch.setattr("sys.stdin", endless)
    np.save(tmp_path / "a.npy", np.arange(1, 5))
    for source in ("-", tmp_path / "a.npy", write(tmp_path / "a.jsonl", '{"length": 1}\n' * 4)):
        with pytest.raises(ValueError, match="holds more than 3 lengths: give a part of them"):
            read(source)
    assert read(write(tmp_path / "three.txt", "1\n2\n3\n")) == [1, 2, 3]


@pytest.mark.parametrize(
    ("records", "field", "lengths"),
    [
        ([{"length": 3}, {"length": 9}], None, [3, 9]),
        ([{"text": "x", "num_tokens": 8}], None, [8]),
        ([{"input_ids": [1, 2, 3], "labels": [1]}], None, [3]),
        ([{"id": 1, "text": "twelve chars"}], None, [3]),
        ([{"answer": "twelve chars", "length": 99}], "answer", [3]),
        ([{"text": ""}], None, [1]),
        ([{"length": "812"}, {"length": " 7 "}], None, [812, 7]),
        ([{"n": "812", "text": "x"}], "n", [812]),
        ([{"n": "no number"}, {"n": "812"}], "n", [2, 1]),
        ([{"input_ids": "[1, 2, 3]"}], None, [3]),
        ([{"question": "eight ch", "answer": 42}, {"question": "eight ch", "answer": "twelve chars"}], None, [2, 5]),
    ],
)
def test_jsonl(tmp_path: Path, records: list[dict[str, object]], field: str | None, lengths: list[int]) -> None:
    lines = "\n".join(map(json.dumps, records)) + "\n\n"
    assert read(write(tmp_path / "a.jsonl", lines), field) == lengths


TALK = [{"role": "user", "content": "eight ch"}, {"role": "assistant", "content": "twelve chars"}]
SHARED = [{"from": "human", "value": "eight ch"}]
CALL = {"content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}
PARTS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "eight ch"}, {"type": "text", "text": "four"}]}
]


@pytest.mark.parametrize(
    ("record", "fields", "length", "about"),
    [
        ({"length": 9, "text": "x"}, (), 9, "field 'length': the length that it says"),
        ({"input_ids": [1, 2, 3]}, (), 3, "field 'input_ids': its tokens, counted"),
        ({"text": "eight ch"}, (), 2, "field 'text': text; 4 characters per token, an estimate (--tokenizer counts)"),
        ({"messages": TALK}, (), 5, "field 'messages': chats: the text of their messages, without what a chat"),
        ({"messages": TALK}, ("messages",), 5, "field 'messages': chats"),
        ({"conversations": [{"from": "human", "value": "eight ch"}]}, (), 2, "field 'conversations': chats"),
        ({"messages": PARTS}, (), 3, "field 'messages': chats"),
        ({"prompt": "eight ch", "completion": "twelve chars"}, (), 5, "field 'prompt' + 'completion': text; 4"),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, (), 5, "field 'prompt' + 'completion': chats"),
        ({"prompt": "eight ch", "completion": "twelve chars"}, ("prompt",), 2, "field 'prompt': text"),
        ({"q": "eight ch", "a": [1, 2]}, ("q", "a"), 4, "field 'q' + 'a': text and its tokens, counted; 4 characters"),
        ({"instruction": "eight ch", "input": "", "output": "four"}, (), 3, "'instruction' + 'output': text"),
        ({"prompt": "eight ch", "id": 1}, (), 2, "field 'prompt': text"),
        (
            {"problem": "eight ch", "solution": "four", "answer": "f"},
            (),
            3,
            "an estimate (--tokenizer counts); not cou",
        ),
        ({"question": "eight ch", "answer": "four", "id": 1}, (), 3, "; not counted: 'id'"),
        # What chat templates show beside what is said
        ({"messages": [*TALK, CALL]}, (), 18, "field 'messages': chats"),
        ({"messages": [{**CALL, "content": None}]}, (), 13, "field 'messages': chats"),
        ({"messages": [{"content": "four", "reasoning_content": "twelve chars", "weight": 0}]}, (), 4, "'messages.wei"),
        ({"messages": [{"content": "four", "thinking": "twelve chars"}]}, (), 4, "field 'messages': chats"),
        (
            {"messages": [{"content": [{"type": "thinking", "thinking": "twelve chars"}, *PARTS[0]["content"]]}]},
            (),
            6,
            "",
        ),
        ({"messages": TALK, "tools": [{"name": "f"}, {"name": "g"}]}, (), 11, "field 'messages', and 'tools': chats"),
        ({"messages": json.dumps(TALK), "tools": '[{"name": "f"}]'}, (), 9, "field 'messages', and 'tools': chats"),
        ({"system": "twelve chars", "tools": "four", "conversations": SHARED}, (), 6, "and 'system', 'tools': chats"),
        (
            {
                "instruction": "four",
                "output": "four",
                "system": "four",
                "history": [["four", "four"], ["four", "four"]],
            },
            (),
            7,
            "field 'instruction' + 'output', and 'system', 'history': text",
        ),
        # Both sequences of a pair
        ({"prompt": "eight ch", "chosen": "four", "rejected": "twelve chars"}, (), 8, "both sequences of a pair count"),
        ({"prompt": "eight ch", "chosen": TALK, "rejected": TALK}, (), 10, "'chosen' + 'rejected': chats"),
        (
            {"conversations": SHARED, "chosen": {"value": "four"}, "rejected": {"value": "four"}, "system": "four"},
            (),
            8,
            "chats",
        ),
        ({"text": "x"}, (), 1, "1 of the samples have no text for a token, and count as 1"),
    ],
)
def test_the_field_used_and_how_tokens_were_counted(
    tmp_path: Path, record: dict[str, object], fields: tuple[str, ...], length: int, about: str
) -> None:
    found = read_all(write(tmp_path / "a.jsonl", json.dumps(record) + "\n"), *fields)
    assert found.tokens.tolist() == [length]
    assert about in found.about


@pytest.mark.parametrize(
    ("records", "fields", "message"),
    [
        ([{"id": 1}], ("text",), "line 1 has no field 'text', only 'id'"),
        ([{"prompt": "a", "reward": "b"}], (), "known to hold a whole sample: 'prompt' is a part"),
        ([{"text": ["one", "two"]}], (), "field 'text' is a list of str: expected tokens .integers., or the messages"),
        ([{"input_ids": [[1, 2], [3]]}], (), "field 'input_ids' is a list of list: expected tokens"),
        ([{"input_ids": [True]}], (), "is a list of bool"),
        ([{"messages": [{"role": "user"}]}], (), "holds the message {'role': 'user'}: expected text in its 'content'"),
        ([{"messages": [{"content": None, "tool_calls": []}]}], (), "expected text in its 'content'"),
        ([{"text": "a"}, {"text": [1]}], (), "line 2 holds its tokens, counted, those before it text: expected the s"),
        ([{"x": "a", "y": "b"}, {"x": "a"}], ("x", "y"), "line 2 has no field 'y', only 'x'"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    tmp_path: Path, records: list[dict[str, object]], fields: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records))), *fields)


def test_quoted_input_is_shortened(tmp_path: Path) -> None:
    long = "x" * 500_000
    for record, field in (
        ({long: 1}, None),
        ({long + str(n): 1 for n in range(20)}, None),
        ({"length": 0}, long),
        ({"length": {long: 1}}, None),
        ({"text": [{long: long}]}, None),
        ({"length": -(10**4000)}, None),
    ):
        with pytest.raises(ValueError, match="line 1") as refused:
            read(write(tmp_path / "a.jsonl", json.dumps(record)), field)
        assert len(str(refused.value)) < 1500
    with pytest.raises(ValueError, match="line 1") as refused:
        read(write(tmp_path / "a.txt", long))
    assert len(str(refused.value)) < 500


ZIPPED = gzip.compress(b'{"length": 5}' * 99)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npy", b"", "cannot be read as an array of lengths .*saved with numpy.save"),
        ("a.npy", b"12", "cannot be read as an array of lengths"),
        ("a.npy", pickle.dumps([1, 2]), "cannot be read as an array of lengths"),
        ("a.npy", b"PK\x03\x04", "cannot be read as an array of lengths"),
        ("a.npy", b"\x93NUMPY", "cannot be read as an array of lengths"),
        ("a.npy", header("(3,)") + b"\x01" * 23, "cannot be read.*expected integers in a file that is whole"),
        ("a.npy", header("(1000000000000,)"), "cannot be read"),
        ("a.npy", header("(10000000000000000000000000000,)"), "cannot be read"),
        ("a.npy", header("(-1,)"), "a.npy"),
        ("a.npy", header("(3,"), "cannot be read"),
        ("a.npy", header("('x',)"), "cannot be read"),
        ("a.npy", header("(1,)", "'|O'") + b"\x00" * 8, "cannot be read"),
        ("a.npy", header("(1,)", "[('a', '<i8')]") + b"\x00" * 8, "expected integers, the tokens of each sample"),
        ("a.npy", header("(1,)", "'<M8[s]'") + b"\x00" * 8, "has dtype datetime64"),
        ("a.npy", header("(8,)", "'|b1'") + b"\x01" * 8, "has dtype bool: expected integers"),
        ("a.npy", header("(1,)", "'<U2'") + b"\x00" * 8, "has dtype <U2: expected integers"),
        ("a.npy", header("(2, 2)") + b"\x01" * 32, r"has shape \(2, 2\): expected one dimension"),
        ("a.npy", header("()") + b"\x01" * 8, r"has shape \(\)"),
        ("a.npy", header("(0,)"), "a.npy"),
        ("a.npy", header("(1,)", "'<u8'") + b"\xff" * 8, "a.npy"),
        ("a.npy", b"\x93NUMPY\x01\x00\xff\xff" + b"x" * 65535, "cannot be read"),
        ("a.jsonl", b"{", "line 1 is not JSON"),
        ("a.jsonl", b"[1]", "line 1 holds a list: expected an object"),
        ("a.jsonl", b'{"id": 1}', "line 1 has the fields 'id': none of them is known.*--field"),
        ("a.jsonl", b'{"length": "many"}', "field 'length' is 'many': expected an integer"),
        (
            "a.jsonl",
            b'{"length": 1.5}',
            "field 'length' is 1.5: expected an integer, a list of tokens, text, or a chat",
        ),
        ("a.jsonl", b'{"length": true}', "field 'length' is True"),
        ("a.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("a.jsonl", b'{"length": 1' + b"0" * 30 + b"}", "line 1, field 'length' is 1000.*at most 1,000,000,000,000"),
        ("a.jsonl", b'{"length": 0}', "line 1, field 'length' is 0: expected a length of at least 1"),
        ("a.jsonl", b'{"length": -4}', "line 1, field 'length' is -4: expected a length of at least 1"),
        ("a.txt", b"4\n1.5\n", "line 2: '1.5' is not an integer"),
        ("a.txt", b"\n", "holds no lengths"),
        ("a.txt", b"\xff\xfe\x00", "line 1 is not text"),
        ("a.txt", b"4\n5\n0\n", "line 3 is 0: expected a length of at least 1"),
        ("a.txt", f"4\n{10**30}\n".encode(), "line 2 is 1000.*at most"),
        ("b.txt", b"3\n\n\xe9\n", "b.txt, line 3 is not text in UTF-8"),
        ("b.jsonl", b'{"text": "abc"}\n\n\xe9\n', "b.jsonl, line 3 is not text in UTF-8"),
        *(
            (name, b"\xff: 1", f"A {form} file is read as one length per line: samples are read from .j")
            for name, form in (("a.arrow", ".arrow"), ("a.jsonl.zst", ".zst"), ("a.yaml", ".yaml"))
        ),
        ("a.jsonl.gz", b'{"length": 5}', "a.jsonl.gz is not whole, or not by gzip"),
        ("b.jsonl.gz", ZIPPED[:-9], "is not whole"),
        ("c.jsonl.gz", ZIPPED[:12] + b"\xff\xff" + ZIPPED[14:], "is not whole"),
        ("a.csv", b"a,length\n1,2,3\n", "line 2 has more values than the first line has names"),
        ("b.csv", b'length\n"1', "is not in the CSV format"),
        ("a.parquet", b"PAR1", "a.parquet cannot be read"),
        ("a.json", b"[4]", "sample 1 holds a int: expected an object"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as refused:
        read(tmp_path / name)
    assert len(str(refused.value)) < 1000


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a file nor a length law: laws are longalign, swesmith, aime"):
        read("long-align")
    with pytest.raises(ValueError, match="is a folder"):
        read(tmp_path)


RECORDS: list[dict[str, Any]] = [
    {"question": "eight ch", "answer": "four, and\nmore", "n": 5},
    {"question": '"twelve" ch', "answer": "ß", "n": 7},
]


@pytest.mark.parametrize("form", [".json", ".json by lines", ".jsonl.gz", ".csv", ".tsv.gz", ".parquet", " saved"])
def test_each_format_gives_the_same_lengths(tmp_path: Path, form: str) -> None:
    path = tmp_path / f"a{form.removesuffix(' by lines')}"
    if form in (".parquet", " saved"):
        datasets = pytest.importorskip("datasets", reason="datasets is an optional package")
        made = datasets.Dataset.from_list([*RECORDS[::-1], RECORDS[0]]).select([1, 0])
        made.to_parquet(path) if form == ".parquet" else made.save_to_disk(path)
    elif form == ".json":
        path.write_text(json.dumps(RECORDS, indent=1))
    else:
        text = io.StringIO()
        if "json" in form:
            text.write("\n".join(map(json.dumps, RECORDS)))
        else:
            rows = csv.DictWriter(text, list(RECORDS[0]), delimiter="," if form == ".csv" else "\t")
            rows.writeheader()
            rows.writerows(RECORDS)
        content = text.getvalue().encode()
        path.write_bytes(gzip.compress(content) if form.endswith(".gz") else content)
    found = read_all(path)
    assert found.tokens.tolist() == [6, 3]
    assert found.about.endswith("not counted: 'n'")
    assert read(path, "n") == [5, 7]


def test_a_call_of_a_tool_counts_the_same_from_columns(tmp_path: Path) -> None:
    """Which have the names of all messages in each, as None."""
    datasets = pytest.importorskip("datasets", reason="datasets is an optional package")
    datasets.Dataset.from_list([{"messages": [*TALK, CALL]}]).to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [18]


def test_a_package_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    assert read(write(tmp_path / "plain.csv", "4\n5\n")) == [4, 5]
    saved = tmp_path / "saved"
    saved.mkdir()
    write(saved / "dataset_dict.json", '{"splits": []}')
    for path, package in ((saved, "datasets"), (tmp_path / "a.parquet", "pyarrow")):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            patch.delitem(sys.modules, "pyarrow.parquet", raising=False)
            with pytest.raises(ValueError, match=f"needs the package {package}: pip install {package}"):
                read(path)


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
    count = TokenCounter(tmp_path / "tokenizer.json", 4.0)
    assert count(["a b a c"]) == 4
    assert count(["a", "b c"]) == 3
    assert count.about == f"tokens of {tmp_path / 'tokenizer.json'}"
    with pytest.raises(ValueError, match="cannot be read as a tokenizer.json"):
        TokenCounter(write(tmp_path / "bad.json", "{}"), 4.0)


def test_timings(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "length,seconds\n1000,0.5\n\n2000,1.25\n")
    assert read_timings(path) == ([1000, 2000], [0.5, 1.25])
    assert read_timings(write(tmp_path / "a.csv", "1e3,0.5\n2000.0,1\n")) == ([1000, 2000], [0.5, 1.0])
    with pytest.raises(ValueError, match="there is no file"):
        read_timings(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"10,1.0\n5\n", "line 2: '5' is not 'length,seconds'"),
        (b"10,nan\n", "finite"),
        (b"10,1.0\n\xff,2\n", "is not text"),
        (b"1.5,0.5\n2000,1\n", "line 1: the length is 1.5, expected an integer"),
        (b"100,fast\n2000,1\n", "line 1: '100,fast' is not 'length,seconds'"),  # names have no numbers
    ],
)
def test_bad_timings(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_timings(tmp_path / "t.csv")


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
