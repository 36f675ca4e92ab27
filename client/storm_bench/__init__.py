"""The programs of `stormd demo` and `stormd bench`: no serving daemon and no trainer imports them.

command       the benchmarks, their arguments, and how their figures are shown
link, activations, train, zoo, codec, scan, ternary, gemm   one benchmark each
demo          two small trainers with and without offload; one that exceeds the GPU's memory
child_daemon  the daemon that a program measures

Programs that measure the client use its public interface, in a process of their own.
"""
