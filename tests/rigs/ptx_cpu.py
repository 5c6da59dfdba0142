"""Compiled kernels on the CPU: the PTX that Triton makes of a kernel, translated to C thread by thread.

Programs run one after the other. So do the threads of a program, each to its end, or to the next barrier or exchange
between the lanes of a warp: all threads must come to the same one. Every instruction, modifier, type or special
register that is not known here is refused. Each access must be a multiple of its size, and lie in shared memory, or in
memory that was named to `Program.run`. NaN is some NaN: payloads are not the GPU's.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

_PRELUDE = r"""
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef struct { uint64_t low, high; } range;
typedef struct { uint64_t address, size, line, program, thread, why; } fault;
enum { OUTSIDE, MISALIGNED, APART };
static range own; /* shared memory */
static const range *ranges, *last;
static uint64_t num_ranges;
static fault *refusal;

static int inside(const range *r, uint64_t address, uint64_t size) {
    return r->low <= address && address <= r->high && size <= r->high - address;
}
static int refused(uint64_t address, uint64_t size, uint64_t line, int is_shared) {
    if (address % size == 0) {
        if (inside(is_shared ? &own : last, address, size)) return 0;
        for (uint64_t i = 0; i < num_ranges && !is_shared; i++)
            if (inside(&ranges[i], address, size)) { last = &ranges[i]; return 0; }
    }
    refusal->address = address; refusal->size = size; refusal->line = line;
    refusal->why = address % size ? MISALIGNED : OUTSIDE;
    return 1;
}

static float f32(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static double f64(uint64_t bits) { double x; memcpy(&x, &bits, 8); return x; }
static uint32_t b32(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static uint64_t b64(double x) { uint64_t bits; memcpy(&bits, &x, 8); return bits; }
static float bf16(uint16_t bits) { return f32((uint32_t)bits << 16); }
static float f16(uint16_t bits) {
    int exponent = bits >> 10 & 31, digits = bits & 1023;
    float finite = exponent ? ldexpf(1024 + digits, exponent - 25) : ldexpf(digits, -24);
    float x = exponent < 31 ? finite : digits ? NAN : INFINITY;
    return bits >> 15 ? -x : x;
}
/* To nearest, ties to even. */
static uint16_t to_bf16(float x) {
    uint32_t bits = b32(x);
    return x != x ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
static uint16_t to_f16(float x) {
    uint32_t bits = b32(fabsf(x)), sign = b32(x) >> 16 & 0x8000;
    if (x != x) return 0x7fff;
    if (bits >= 0x477ff000) return sign | 0x7c00; /* from 65520 on */
    if (bits < 0x38800000) return sign | (uint16_t)rintf(fabsf(x) * 16777216.0f); /* in units of 2**-24 */
    return sign | (bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13;
}
static uint32_t bfe(uint32_t x, uint32_t from, uint32_t count) {
    return from > 31 ? 0 : x >> from & (count > 31 ? ~0u : (1u << count) - 1);
}
/* Atomics on global memory flush subnormal numbers, keeping the sign. */
static float flushed(float x) { return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x; }
static float atomically_added(float x, float y) { return flushed(flushed(x) + flushed(y)); }
"""
_GIVEN = r"""
static uint32_t given(uint32_t tid, uint32_t lane) { return states[tid & ~31u | lane].given; }
static uint32_t reduced_add(uint32_t tid) {
    uint32_t sum = 0;
    for (uint32_t lane = 0; lane < 32; lane++) sum += given(tid, lane);
    return sum;
}
static uint32_t reduced_max(uint32_t tid) {
    int32_t most = given(tid, 0);
    for (uint32_t lane = 1; lane < 32; lane++) if ((int32_t)given(tid, lane) > most) most = given(tid, lane);
    return most;
}
"""
_DRIVE = r"""
int run(const uint64_t *params, uint32_t first, uint32_t end, uint32_t programs,
        const range *where, uint64_t num_where, fault *report) {
    ranges = last = where; num_ranges = num_where; refusal = report;
    own.low = (uint64_t)shared; own.high = own.low + SHARED;
    for (uint32_t program = first; program < end; program++) {
        /* Not zero: what is read before it is written should be seen. */
        memset(states, 0x8b, sizeof states);
        memset(shared, 0x8b, sizeof shared);
        for (uint32_t tid = 0; tid < THREADS; tid++) states[tid].at = 0;
        int point = 0;
        do {
            for (uint32_t tid = 0; tid < THREADS; tid++) {
                int reached = thread(&states[tid], params, program, programs, tid);
                report->program = program; report->thread = tid;
                if (reached < 0) return 1;
                if (tid && reached != point) {
                    report->why = APART; report->line = states[reached ? tid : 0].line;
                    return 1;
                }
                point = reached;
            }
            for (uint32_t tid = 0; tid < THREADS; tid++) states[tid].taken = exchange(point, tid, tid % 32);
        } while (point);
    }
    return 0;
}
"""
# -Og: compiles in a tenth of the time of -O1, which takes all registers apart at each barrier. -ffp-contract=off: only
# what is an fma in the PTX may be one here.
_FLAGS = ("-Og", "-fwrapv", "-ffp-contract=off", "-fno-strict-aliasing", "-shared", "-fPIC", "-x", "c")

_SPECIAL = {"%tid.x": "tid", "%ntid.x": "THREADS", "%ctaid.x": "program", "%nctaid.x": "programs"}
_INT, _BITS, _FLOAT = r"[su](?:16|32|64)", r"[bsu](?:16|32|64)", r"f(?:32|64)"
_SIMPLE: dict[str, str] = {
    rf"(?:add|sub)\.(?:{_INT}|{_FLOAT})": "{a} {op} {b}",
    rf"mul\.lo\.{_INT}": "{a} * {b}",
    rf"mad\.lo\.{_INT}": "{a} * {b} + {c}",
    rf"rem\.{_INT}": "{a} % {b}",
    r"(?:and|or|xor)\.(?:b16|b32|b64|pred)": "{a} {op} {b}",
    r"not\.(?:b16|b32|b64)": "~{a}",
    r"not\.pred": "!{a}",
    r"bfe\.u32": "bfe({a}, {b}, {c})",
    r"neg\.s(?:16|32|64)": "-{a}",
    rf"min\.{_INT}": "{a} < {b} ? {a} : {b}",
    rf"max\.{_INT}": "{a} > {b} ? {a} : {b}",
    rf"fma\.rn\.{_FLOAT}": "fma{suffix}({a}, {b}, {c})",
    rf"mov\.(?:{_BITS}|{_FLOAT}|pred)": "{a}",
}
"""Instructions whose operands and result have one type, which the name ends with; ``{a}``: the first operand."""
_OPERATORS = {"add": "+", "sub": "-", "and": "&", "or": "|", "xor": "^"}
_COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_CACHING = r"(?:\.(?:ca|cg|cs|L1::evict_\w+|L1::no_allocate))*"
"""Of no consequence to one thread."""
_CASTS = {
    **{f"cvt.f32.{half}": ("f32", half, "{a}") for half in ("f16", "bf16")},
    **{f"cvt.f64.{narrow}": ("f64", narrow, "{a}") for narrow in ("f32", "f16", "bf16")},
    "cvt.rn.f32.f64": ("f32", "f64", "(float){a}"),
    **{f"cvt.rn.{half}.f32": ("b16", "f32", f"to_{half}({{a}})") for half in ("f16", "bf16")},
    **{
        f"cvt.rn.{half}x2.f32": ("b32", "f32", f"(uint32_t)to_{half}({{a}}) << 16 | to_{half}({{b}})")
        for half in ("f16", "bf16")
    },
}
"""Types of result and operands, and the cast."""
_SHARED = ".extern .shared .align 16 .b8 global_smem[];"
_EXCHANGES = {
    r"shfl\.sync\.up\.b32": ("0", "given(tid, lane < {by} ? lane : lane - {by})"),
    r"shfl\.sync\.bfly\.b32": ("31", "given(tid, lane ^ {by})"),
}
"""Shuffles of whole warps: the operand that says where they end, and what a lane takes."""


class PtxError(ValueError):
    """PTX that is not understood."""


class AccessError(RuntimeError):
    """An access that a GPU would not make, or that is none of the kernel's business."""


class _Translation:
    """From the text of one kernel to C, in which a thread has its registers in ``t``."""

    def __init__(self, ptx: str) -> None:
        # Shared memory of its own block is all that a program has here, whether Triton (3.8) says so or not.
        plain = ptx.replace(".shared::cta.", ".shared.")
        self.lines = [line.partition("//")[0].strip() for line in plain.splitlines()]
        self.number = 0
        self.params: list[tuple[str, str]] = []
        """Name and type: ``u64``, ``u32``, ``f32``."""
        self.threads = 0
        self.widths = {"pred": 0}
        self.declarations: list[str] = []
        self.body: list[str] = []
        self.exchanges: list[str] = []
        """What a thread, ``tid``, takes at each point where all come together."""
        self._read()

    def refuse(self, why: str) -> PtxError:
        return PtxError(f"line {self.number} of the PTX, {self.lines[self.number - 1]!r}: {why}")

    def _read(self) -> None:
        """One entry; before it shared memory at most, and nothing but debugging information behind it."""
        part = "head"
        for number, line in enumerate(self.lines, 1):
            self.number = number
            if not line:
                continue
            if part == "head" and re.fullmatch(r"\.visible \.entry \w+\(", line):
                part = "params"
            elif part == "params" and line == ")":
                part = "limits"
            elif part == "limits" and line == "{":
                part = "body"
            elif part == "body" and line == "}":
                part = "tail"
            elif part == "body":
                for statement in re.findall(r"[^;:]*(?:::[^;:]*)*[;:]|.+", line):
                    self._statement(statement.strip())
            elif part == "params" and (found := re.fullmatch(r"\.param \.([ubf](?:32|64))(?: \.ptr.*)? (\w+),?", line)):
                self.params.append((found[2], found[1]))
            elif part == "limits" and (found := re.fullmatch(r"\.(?:req|max)ntid (\d+)(?:, 1)*", line)):
                self.threads = int(found[1])
            elif part == "head" and re.match(r"\.(version|target|address_size) |" + re.escape(_SHARED) + "$", line):
                pass
            elif part != "tail" or not re.match(r"\.(file|section|b8|b16|b32|b64)\s|[{}]|[$\w]+:", line):
                raise self.refuse("not known here")
        if part != "tail" or not self.threads:
            raise PtxError(f"no kernel with a number of threads: {self.lines[:20]}")

    def _statement(self, text: str) -> None:
        if re.match(r"\.loc\s|\.pragma ", text):
            return
        if found := re.fullmatch(r"\.reg \.([bfsu](?:16|32|64)|pred)\s+%([a-z]+)<(\d+)>;", text):
            self._declare(found[1], found[2], int(found[3]))
        elif found := re.fullmatch(r"\$?(\w+):", text):
            self.body.append(f"{found[1]}:;")
        elif found := re.fullmatch(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*);", text):
            code = self._instruction(found[3], _operands(found[4]))
            if found[2] and "case " in code:
                raise self.refuse("only for some threads")
            self.body.append(f"if ({found[1]}{self._register(found[2], 'pred')}) {{ {code} }}" if found[2] else code)
        else:
            raise self.refuse("not known here")

    def _declare(self, kind: str, prefix: str, count: int) -> None:
        width = 0 if kind == "pred" else int(kind[1:])
        self.widths[prefix] = width
        names = ", ".join(f"{prefix}{i}" for i in range(count))
        self.declarations.append(f"uint{width or 8}_t {names};")

    def _register(self, operand: str, kind: str, or_wider: bool = False) -> str:
        found = re.fullmatch(r"%([a-z]+)\d+", operand)
        width = 0 if kind == "pred" else int(re.sub(r"\D", "", kind))
        has = self.widths.get(found[1], -1) if found else -1
        if has != width and not (or_wider and has > width > 0):
            raise self.refuse(f"{operand} is no register of type {kind}")
        return f"t.{operand[1:]}"

    def _value(self, operand: str, kind: str) -> str:
        """The operand as an expression of this type."""
        if operand in _SPECIAL and kind == "u32":
            return _SPECIAL[operand]
        if operand == "global_smem" and kind == "b32":
            return "0"
        ctype = {"s": "int{}_t", "u": "uint{}_t", "b": "uint{}_t"}.get(kind[0] if kind != "bf16" else "f", "")
        if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)", operand) and ctype:
            return f"({ctype.format(kind[1:])}){int(operand, 0) & (1 << 64) - 1:#x}u"
        if found := re.fullmatch(r"0[fd]([0-9A-F]{8}|[0-9A-F]{16})", operand):
            if kind not in (f"f{4 * len(found[1])}", f"b{4 * len(found[1])}"):
                raise self.refuse(f"{operand} is no {kind}")
            return f"f{kind[1:]}(0x{found[1]}u)" if kind[0] == "f" else f"0x{found[1]}u"
        name = self._register(operand, kind)
        if kind == "pred":
            return name
        return f"({ctype.format(kind[1:])}){name}" if ctype else f"{kind}({name})"

    def _assign(self, operand: str, kind: str, expression: str) -> str:
        if kind[0] == "f":
            expression = f"b{kind[1:]}({expression})"
        return f"{self._register(operand, kind)} = {expression};"

    def _instruction(self, name: str, operands: list[str]) -> str:
        for pattern, translate in _TRANSLATIONS.items():
            if found := re.fullmatch(pattern, name):
                try:
                    return translate(self, found, *operands)
                except TypeError as error:
                    raise self.refuse("not with these operands") from error
        raise self.refuse("this instruction is not known here")

    def _simple(self, form: str, found: re.Match[str], to: str, *operands: str) -> str:
        kind = found[0].rpartition(".")[2]
        if len(operands) != len(set(re.findall(r"\{[abc]\}", form))):
            raise TypeError
        values = dict(zip("abc", (f"({self._value(o, kind)})" for o in operands), strict=False))
        operator, suffix = _OPERATORS.get(found[0].partition(".")[0], ""), "f" if kind == "f32" else ""
        return self._assign(to, kind, form.format(op=operator, suffix=suffix, **values))

    def _shift(self, found: re.Match[str], to: str, a: str, by: str) -> str:
        """Beyond the width nothing is left, or the sign."""
        kind, value, count = found[2], self._value(a, found[2]), self._value(by, "u32")
        width = int(kind[1:])
        if found[1] == "shl":
            return self._assign(to, kind, f"{count} < {width} ? {value} << {count} : 0")
        beyond = f"{value} >> {width - 1}" if kind[0] == "s" else "0"
        return self._assign(to, kind, f"{count} < {width} ? {value} >> {count} : {beyond}")

    def _wide(self, found: re.Match[str], to: str, a: str, b: str, *c: str) -> str:
        kind = found[2]
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        ctype = f"{'u' if kind[0] == 'u' else ''}int{wide[1:]}_t"
        added = f" + {self._value(*c, wide)}" if found[1] == "mad" else ""
        if len(c) != len(added[:1]):
            raise TypeError
        return self._assign(to, wide, f"({ctype}){self._value(a, kind)} * {self._value(b, kind)}{added}")

    def _compare(self, found: re.Match[str], to: str, a: str, b: str) -> str:
        operator = _COMPARISONS[found[1]]
        return self._assign(to, "pred", f"{self._value(a, found[2])} {operator} {self._value(b, found[2])}")

    def _select(self, found: re.Match[str], to: str, a: str, b: str, which: str) -> str:
        kind = found[1]
        chosen = f"{self._value(which, 'pred')} ? {self._value(a, kind)} : {self._value(b, kind)}"
        return self._assign(to, kind, chosen)

    def _cast(self, found: re.Match[str], to: str, *operands: str) -> str:
        kind, origin, form = _CASTS[found[0]]
        if len(operands) != 1 + ("{b}" in form):
            raise TypeError
        values = dict(zip("ab", (self._value(o, origin) for o in operands), strict=False))
        return self._assign(to, kind, form.format(**values))

    def _convert(self, found: re.Match[str], to: str, a: str) -> str:
        """Between integers: the operand's type says how many bits count, and whether the sign is carried on."""
        kind = found[2]
        low = f"({'u' if kind[0] == 'u' else ''}int{kind[1:]}_t){self._register(a, kind, or_wider=True)}"
        return self._assign(to, found[1], low)

    def _pack(self, found: re.Match[str], to: str, a: str) -> str:
        """``{low, high}`` on one side."""
        width, halves = int(found[1]), re.fullmatch(r"\{\s*(\S+),\s*(\S+)\s*\}", to if to[0] == "{" else a)
        if not halves:
            return self._simple("{a}", found, to, a)
        whole, half = f"b{width}", f"b{width // 2}"
        if to[0] != "{":
            low, high = (self._value(part, half) for part in halves.groups())
            return self._assign(to, whole, f"(uint{width}_t){high} << {width // 2} | {low}")
        value = self._value(a, whole)
        taken = zip(halves.groups(), (value, f"{value} >> {width // 2}"), strict=True)
        return " ".join(self._assign(part, half, expression) for part, expression in taken if part != "_")

    def _param(self, found: re.Match[str], to: str, place: str) -> str:
        for number, (name, kind) in enumerate(self.params):
            if place == f"[{name}]" and kind[1:] == found[1][1:]:
                return self._assign(to, f"b{kind[1:]}", f"params[{number}]")
        raise self.refuse("no parameter of this type")

    def _place(self, operand: str, size: int, space: str) -> tuple[str, str]:
        """Where in the host's memory an access is, and its check; shared memory has addresses from 0 on."""
        found = re.fullmatch(r"\[\s*(%\w+|global_smem)\s*(?:\+\s*(-?\d+)\s*)?\]", operand)
        if not found or (found[1] == "global_smem" and space == "global"):
            raise self.refuse(f"{operand} is no address")
        address = f"({self._value(found[1], 'b64' if space == 'global' else 'b32')} + (int64_t){found[2] or 0})"
        if space == "shared":
            address = f"((uint64_t)shared + {address})"
        return address, f"if (refused({address}, {size}, {self.number}, {int(space == 'shared')})) return -1;"

    def _registers(self, operand: str, found: re.Match[str]) -> tuple[list[str], int]:
        """Those of a vector, and the size of each in bytes."""
        kind = found["kind"]
        registers = [self._register(o, kind) for o in operand.strip("{} ").replace(",", " ").split()]
        if len(registers) != int(found["count"] or 1):
            raise self.refuse(f"{operand} are not {found['count'] or 1} registers")
        return registers, int(kind[1:]) // 8

    def _load(self, found: re.Match[str], to: str, place: str) -> str:
        registers, size = self._registers(to, found)
        address, check = self._place(place, size * len(registers), found["space"])
        reads = (f"memcpy(&{r}, (void *)(place + {i * size}), {size});" for i, r in enumerate(registers))
        return f"{{ uint64_t place = {address}; {check} {' '.join(reads)} }}"

    def _store(self, found: re.Match[str], place: str, values: str) -> str:
        registers, size = self._registers(values, found)
        address, check = self._place(place, size * len(registers), found["space"])
        writes = (f"memcpy((void *){address[:-1]} + {i * size}), &{r}, {size});" for i, r in enumerate(registers))
        return f"{check} {' '.join(writes)}"

    def _atomic(self, found: re.Match[str], *operands: str) -> str:
        """One addition after the other: nothing else runs."""
        if sorted(found["how"].split(".")[1:]) != ["add", "global", "relaxed", "sys"]:
            raise self.refuse("this kind is not known here")
        *to, place, values = operands
        addends, size = self._registers(values, found)
        address, check = self._place(place, size * len(addends), "global")
        code = [f"uint64_t place = {address}; {check}"]
        for i, addend in enumerate(addends):
            code.append(f"uint32_t old{i}; memcpy(&old{i}, (void *)(place + {i * size}), {size});")
            code.append(f"uint32_t new{i} = b32(atomically_added(f32(old{i}), f32({addend})));")
            code.append(f"memcpy((void *)(place + {i * size}), &new{i}, {size});")
        if len(to) != (found["op"] == "atom"):
            raise TypeError
        if to:
            code += [f"{register} = old{i};" for i, register in enumerate(self._registers(to[0], found)[0])]
        return f"{{ {' '.join(code)} }}"

    def _branch(self, found: re.Match[str], label: str) -> str:
        return f"goto {label.lstrip('$')};"

    def _meet(self, given: str, taken: str) -> str:
        """All threads come to this point, each with something; none goes on before."""
        self.exchanges.append(taken)
        point = len(self.exchanges)
        return f"t.given = {given}; t.at = {point}; t.line = {self.number}; *state = t; return {point}; case {point}:;"

    def _barrier(self, found: re.Match[str], number: str) -> str:
        if number != "0":
            raise self.refuse("not for all threads")
        return self._meet("0", "0")

    def _shuffle(self, found: re.Match[str], to: str, a: str, by: str, end: str, lanes: str) -> str:
        wanted, form = _EXCHANGES[found.re.pattern]
        if (end, lanes) != (wanted, "-1") or not by.isdigit() or self.threads % 32:
            raise self.refuse("not for whole warps")
        return self._meet(self._value(a, "b32"), form.format(by=by)) + self._assign(to, "b32", "t.taken")

    def _reduce(self, found: re.Match[str], to: str, a: str, lanes: str) -> str:
        if self.threads % 32:
            raise self.refuse("not for whole warps")
        check = (
            f"if (~{self._value(lanes, 'b32')}) {{ refusal->why = APART; refusal->line = {self.number}; return -1; }}"
        )
        taken = f"reduced_{found[1]}(tid)"
        return check + self._meet(self._value(a, "b32"), taken) + self._assign(to, "b32", "t.taken")

    def source(self, shared_bytes: int) -> str:
        return "\n".join(
            [
                _PRELUDE,
                f"#define THREADS {self.threads}",
                f"#define SHARED {shared_bytes}",
                "static _Alignas(16) uint8_t shared[SHARED + 1];",
                "static struct state { int at; uint32_t given, taken, line;",
                *self.declarations,
                "} states[THREADS];",
                "static int thread(struct state *state, const uint64_t *params, uint32_t program, uint32_t programs,",
                "                  uint32_t tid) {",
                "struct state t = *state;",
                "switch (t.at) { case 0:;",
                *self.body,
                "}",
                "return -1; }",
                _GIVEN,
                "static uint32_t exchange(int point, uint32_t tid, uint32_t lane) {",
                "switch (point) {",
                *(f"case {point}: return {taken};" for point, taken in enumerate(self.exchanges, 1)),
                "}",
                "return 0; }",
                _DRIVE,
            ]
        )


def _simple(form: str) -> Callable[..., str]:
    return lambda translation, found, *operands: translation._simple(form, found, *operands)


_TRANSLATIONS: dict[str, Callable[..., str]] = {
    r"mov\.b(32|64)": _Translation._pack,
    **{pattern: _simple(form) for pattern, form in _SIMPLE.items()},
    r"(shl)\.(b(?:16|32|64))": _Translation._shift,
    rf"(shr)\.({_BITS})": _Translation._shift,
    r"(mul|mad)\.wide\.([su](?:16|32))": _Translation._wide,
    rf"setp\.(eq|ne|lt|le|gt|ge)\.({_INT})": _Translation._compare,
    r"setp\.(eq|ne)\.(b(?:16|32|64))": _Translation._compare,
    rf"selp\.({_BITS}|{_FLOAT})": _Translation._select,
    **{re.escape(name): _Translation._cast for name in _CASTS},
    rf"cvt\.({_INT})\.({_INT})": _Translation._convert,
    r"ld\.param\.([bfsu](?:32|64))": _Translation._param,
    rf"ld\.(?P<space>global|shared){_CACHING}(?:\.v(?P<count>2|4))?\.(?P<kind>{_BITS}|{_FLOAT})": _Translation._load,
    rf"st\.(?P<space>global|shared){_CACHING}(?:\.v(?P<count>2|4))?\.(?P<kind>{_BITS}|{_FLOAT})": _Translation._store,
    r"(?P<op>atom|red)(?P<how>(?:\.[a-z]+)+)(?:\.v(?P<count>2|4))?\.(?P<kind>f32)": _Translation._atomic,
    r"bar\.sync": _Translation._barrier,
    **dict.fromkeys(_EXCHANGES, _Translation._shuffle),
    r"redux\.sync\.(add|max)\.s32": _Translation._reduce,
    r"bra(?:\.uni)?": _Translation._branch,
    r"ret": lambda translation, found: "return 0;",
}


def _operands(text: str) -> list[str]:
    """
    >>> _operands("{ %r1, %r2 }, [ %rd5 + 0 ]")
    ['{ %r1, %r2 }', '[ %rd5 + 0 ]']
    """
    return [part.strip() for part in re.findall(r"\s*(\{[^}]*\}|[^,]+)\s*(?:,|$)", text)]


class Program:
    """A kernel that was compiled to PTX, as a function of the host."""

    def __init__(self, ptx: str, folder: Path, shared_bytes: int = 0) -> None:
        """The library is made in ``folder``, unless it is there; ``shared_bytes``: of memory that threads share."""
        translation = _Translation(ptx)
        self.lines, self.params = ptx.splitlines(), [kind for _, kind in translation.params]
        source = translation.source(shared_bytes)
        path = folder / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.so"
        if not path.exists():
            compiler = shutil.which("gcc") or shutil.which("cc") or "gcc"
            part = path.with_suffix(".part")
            command = [compiler, *_FLAGS, "-", "-o", str(part), "-lm"]
            done = subprocess.run(command, input=source, capture_output=True, text=True)
            if done.returncode:
                raise PtxError(f"the translation does not compile: {done.stderr[:2000]}")
            part.rename(path)
        self._run = ctypes.CDLL(str(path)).run

    def run(
        self,
        arguments: Sequence[float],
        memory: Sequence[tuple[int, int]],
        programs: int,
        only: tuple[int, int] | None = None,
    ) -> None:
        """Run ``programs`` programs, or those in ``only`` (from, to).

        ``arguments``: a number or an address per parameter. ``memory``: where the kernel may read and write, from and
        to. Raises AccessError for an access that is elsewhere or misaligned, when it would be made.
        """
        params = [_packed(argument, kind) for argument, kind in zip(arguments, self.params, strict=True)]
        ranges = [bound for part in [*memory, (0, 0)] for bound in part]
        fault = (ctypes.c_uint64 * 6)()
        first, end = only or (0, programs)
        given = (ctypes.c_uint64 * len(ranges))(*ranges)
        words = (ctypes.c_uint64 * len(params))(*params)
        if self._run(words, first, end, programs, given, ctypes.c_uint64(len(memory) + 1), fault):
            address, size, line, program, thread, why = fault
            place = f"{size} bytes at {address:#x}"
            what = (f"{place}: outside of the memory of this launch", f"{place}: misaligned", "not for all threads")[
                why
            ]
            raise AccessError(
                f"{what}; program {program}, thread {thread}, line {line} of the PTX, {self.lines[line - 1].strip()!r}"
            )


def _packed(argument: float, kind: str) -> int:
    if kind == "f32":
        return int(struct.unpack("<I", struct.pack("<f", argument))[0])
    if argument != int(argument) or not -(1 << int(kind[1:]) - 1) <= argument < 1 << int(kind[1:]):
        raise ValueError(f"{argument} for a parameter of type {kind}")
    return int(argument) % (1 << int(kind[1:]))
