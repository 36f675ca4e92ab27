"""The C codec under AddressSanitizer and UBSan: no blob, however damaged, leads outside a buffer.

fuzz_codec.c does the encoding, damaging and decoding; here it is built from the package's sources.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "kernels" / "storm_kernels"
SOURCES, SHARED = KERNELS / "ancf" / "csrc", KERNELS / "native"
SANITIZE = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
# Lines are enough; to optimise takes the compiler longer than it saves, and hides accesses.
COMMON = ["-std=gnu11", "-O0", "-g1", *SANITIZE.split()]
AVX2 = "-mavx2 -mbmi -mbmi2 -mlzcnt -mpopcnt"
AVX512 = f"{AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vbmi -mavx512vbmi2"
SETS = {  # of this machine's architecture: source, flags
    "x86_64": {"AVX2": ("x86/kernels_avx2.c", AVX2), "AVX512": ("x86/kernels_avx512.c", AVX512)},
    "aarch64": {"NEON": ("arm/kernels_neon.c", "")},
}.get(platform.machine(), {})


def compile_object(cc: str, source: Path, flags: list[str], folder: Path) -> Path:
    target = folder / f"{source.stem}.o"
    subprocess.run(
        [cc, *COMMON, *flags, f"-I{SOURCES}", f"-I{SHARED}", "-c", str(source), "-o", str(target)],
        check=True,
    )
    return target


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program, or a skip where this machine's compiler has no sanitizers."""
    cc = shutil.which("cc") or shutil.which("gcc")
    if cc is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("fuzz")
    trial = folder / "trial.c"
    trial.write_text("int main(void) { return 0; }\n")
    linked = subprocess.run([cc, *COMMON, str(trial), "-o", str(folder / "trial")], check=False)
    if linked.returncode:
        pytest.skip(f"{cc} cannot build with {SANITIZE}")
    have = [f"-DSTORM_HAVE_{name}" for name in SETS]
    objects = [
        compile_object(cc, source, have, folder)
        for source in [
            *sorted(SOURCES.glob("*.c")),
            *sorted(SHARED.glob("*.c")),
            HERE / "fuzz_codec.c",
        ]
    ]
    for source, flags in SETS.values():
        objects.append(compile_object(cc, SOURCES / source, flags.split(), folder))
    program = folder / "fuzz_codec"
    subprocess.run([cc, *COMMON, *map(str, objects), "-lpthread", "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("rounds", [100, pytest.param(5000, marks=pytest.mark.slow)])
def test_no_access_leaves_its_buffer(fuzzer, rounds):
    found = subprocess.run(
        [str(fuzzer), str(rounds)], capture_output=True, text=True, check=False, timeout=500
    )
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout.strip() == f"{rounds} rounds"
