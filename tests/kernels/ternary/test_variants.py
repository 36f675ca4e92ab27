"""compare_variants.c, here under sanitizers, and for 64-bit ARM under emulation.

It holds every variant to plain C with arrays that end where their memory does.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from storm_kernels.ternary.cpu import Variant

HERE = Path(__file__).parent
KERNELS = HERE.parents[2] / "kernels" / "storm_kernels"
SOURCES, SHARED = KERNELS / "ternary" / "csrc", KERNELS / "native"
COMMON = ["-std=gnu11", "-O2", "-g", "-ffp-contract=off", "-Wall", "-Werror"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
AVX2 = "-mavx2 -mbmi -mbmi2 -mlzcnt -mpopcnt"
AVX512 = f"{AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vbmi -mavx512vbmi2"
SETS = {  # by architecture: variant, source, flags
    "x86_64": [
        ("AVX2", "x86/kernels_avx2.c", AVX2),
        ("AVX512", "x86/kernels_avx512.c", AVX512),
        ("AVX512_VNNI", "x86/kernels_avx512_vnni.c", f"{AVX512} -mavx512vnni -mavx512vpopcntdq"),
    ],
    "aarch64": [
        ("NEON", "arm/kernels_neon.c", ""),
        ("NEON_DOT", "arm/kernels_neon_dot.c", "-march=armv8.2-a+dotprod"),
    ],
}
PLAIN = ["kernels_portable.c", "ternary.c", "variants.c"]


def build(cc: str, machine: str, folder: Path, extra: list[str]) -> Path:
    """Return the program for an architecture, with all variants of it."""
    have = [f"-DSTORM_HAVE_{name}" for name, _, _ in SETS[machine]]
    sources = [SOURCES / name for name in PLAIN]
    sources += [SHARED / "features.c", SHARED / "parallel.c", HERE / "compare_variants.c"]
    work = [(source, "") for source in sources]
    work += [(SOURCES / source, flags) for _, source, flags in SETS[machine]]
    objects = []
    for number, (source, flags) in enumerate(work):
        objects.append(folder / f"{number}.o")
        command = [cc, *COMMON, *extra, *have, *flags.split(), f"-I{SHARED}", "-c", str(source)]
        subprocess.run([*command, "-o", str(objects[-1])], check=True)
    program = folder / "compare_variants"
    linking = [cc, *COMMON, *extra, *map(str, objects), "-lpthread", "-lm", "-o", str(program)]
    subprocess.run(linking, check=True)
    return program


def variants_of(command: list[str]) -> set[Variant]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    return {Variant(int(one)) for one in done.stdout.split()}


@pytest.mark.slow
def test_no_variant_leaves_its_arrays(tmp_path):
    cc, machine = shutil.which("cc") or shutil.which("gcc"), platform.machine()
    if cc is None or machine not in SETS:
        pytest.skip("no C compiler for this machine")
    trial = tmp_path / "trial.c"
    trial.write_text("int main(void) { return 0; }\n")
    linked = subprocess.run([cc, *SANITIZE, str(trial), "-o", str(tmp_path / "trial")], check=False)
    if linked.returncode:
        pytest.skip(f"{cc} has no sanitizers")
    program = build(cc, machine, tmp_path, SANITIZE)
    assert Variant.PORTABLE in variants_of([str(program), "60"])


def test_neon_under_emulation(tmp_path):
    cc, emulator = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64")
    if cc is None or emulator is None:
        pytest.skip("needs gcc-aarch64-linux-gnu and qemu-user")
    program = build(cc, "aarch64", tmp_path, ["-static"])
    expected = {Variant.PORTABLE, Variant.NEON, Variant.NEON_DOT}
    assert variants_of([emulator, "-cpu", "max", str(program), "100"]) == expected
    old = [emulator, "-cpu", "cortex-a72", str(program), "30"]
    assert variants_of(old) == expected - {Variant.NEON_DOT}
