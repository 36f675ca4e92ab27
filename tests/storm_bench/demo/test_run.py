"""What the demo runs: command lines of daemon and trainers."""

from __future__ import annotations

from storm_bench.demo.run import Plan

from stormd.config import config_options

PLAN = Plan(device="cpu", dtype="float32")


def test_runs_differ_in_the_address_alone() -> None:
    plain, offload = PLAN.arguments(0, None), PLAN.arguments(0, "ipc:///x")
    assert offload == [*plain, "--address=ipc:///x"]


def test_trainers_differ_in_their_seed_alone() -> None:
    one, two = set(PLAN.arguments(0, None)), set(PLAN.arguments(1, None))
    assert {flag.split("=")[0] for flag in one ^ two} == {"--seed"}


def test_trainers_share_the_cores() -> None:
    alone = Plan(device="cpu", dtype="float32", trainers=1)
    many = Plan(device="cpu", dtype="float32", trainers=10_000)
    threads = [
        next(int(flag.split("=")[1]) for flag in plan.arguments(0, None) if "threads" in flag)
        for plan in (alone, many)
    ]
    assert threads[0] >= threads[1] == 1


def test_the_daemon_knows_its_flags() -> None:
    known = {option.flag for option in config_options()}
    assert {flag.split("=")[0] for flag in PLAN.daemon_flags()} <= known
