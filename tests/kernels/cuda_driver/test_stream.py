"""Streams keep the order that was asked for, by events and by counters."""

from __future__ import annotations

import torch
from support.cuda_only import cuda_only
from support.waiting import wait_until

pytestmark = cuda_only


def test_a_stream_waits_for_a_counter_that_the_cpu_stores() -> None:
    from storm_kernels.cuda_driver import Event, MappedHost, Stream, wait_value

    stream, event, mapped = Stream(), Event(), MappedHost(64)
    wait_value(stream.handle, mapped.device_address, 5)
    event.record(stream.handle)
    mapped.words()[0] = 4
    assert not event.done()
    mapped.words()[0] = 6
    wait_until(event.done)
    for owned in (event, stream, mapped):
        owned.close()


def test_a_stream_is_done_when_all_that_is_on_it_is() -> None:
    from storm_kernels.cuda_driver import MappedHost, Stream, wait_value

    stream, mapped = Stream(), MappedHost(64)
    assert stream.done()
    wait_value(stream.handle, mapped.device_address, 1)
    assert not stream.done()
    mapped.words()[0] = 1
    wait_until(stream.done)
    for owned in (stream, mapped):
        owned.close()


def test_a_copy_is_behind_the_event_that_its_stream_waits_for() -> None:
    from storm_kernels.cuda_driver import Event, MappedHost, Stream, copy_async, wait_event
    from storm_kernels.cuda_driver import wait_value as wait

    one, other, event, gate = Stream(), Stream(), Event(), MappedHost(64)
    source = torch.arange(1024, device="cuda")
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    wait(one.handle, gate.device_address, 1)
    event.record(one.handle)
    wait_event(other.handle, event)
    copy_async(target.data_ptr(), source.data_ptr(), source.nbytes, other.handle)
    gate.words()[0] = 1
    other.synchronize()
    assert torch.equal(target, source)
    for owned in (event, one, other, gate, gate):
        owned.close()


def test_device_time_lies_between_two_timed_events() -> None:
    from storm_kernels.cuda_driver import Event, Stream, elapsed_seconds

    stream, begin, end = Stream(), Event(timed=True), Event(timed=True)
    begin.record(stream.handle)
    end.record(stream.handle)
    end.synchronize()
    assert 0 <= elapsed_seconds(begin, end) < 1
    for owned in (begin, end, stream):
        owned.close()
