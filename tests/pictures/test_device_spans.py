"""Programs of a profile, told apart on a GPU and on a CPU."""

from types import SimpleNamespace as Namespace

import pytest

from jaxspec.pictures.device_spans import program_intervals


def event(name, start_us, duration_us=0.0):
    return Namespace(name=name, start_ns=start_us * 1e3, duration_ns=duration_us * 1e3)


def plane(name, **lines):
    return Namespace(
        name=name,
        lines=[
            Namespace(name=line.replace("_", " "), events=events) for line, events in lines.items()
        ],
    )


HOST = plane("/host:CPU", python=[event("jaxspec:loop", 0, 100)])
GPU = plane(
    "/device:GPU:0",
    Stream_13=[event("b", 14, 4), event("a", 10, 3), event("a", 30, 3), event("b", 34, 6)],
    Stream_14=[event("copy", 19, 1), event("copy", 41, 1)],
    XLA_Modules=[event("jit_step", 10, 10)],
)


def test_a_gpus_program_goes_from_its_first_kernel_to_its_last():
    assert program_intervals([HOST, GPU], 2) == [(10, 20), (30, 42)]


def region(start, end):
    return [
        event("ThreadpoolListener::StartRegion", start),
        event("fusion", start + 1, 2),
        event("ThreadpoolListener::StopRegion", end),
    ]


@pytest.mark.parametrize("client", ["tf_XLAExecute", "tf_XLAPjRtCpuClient"])
def test_a_cpus_program_is_a_region_of_its_client(client):
    cpu = Namespace(
        name="/host:CPU",
        lines=[
            Namespace(name=f"{client}/1", events=[*region(0, 10), *region(19, 30)]),
            Namespace(name=f"{client}/2", events=[*region(9, 20), *region(31, 40)[:2]]),
            Namespace(name="tf_XLAEigen/3", events=region(2, 3)),
        ],
    )
    # Each has ended when the next one begins, though its thread lets go later. The last one ends
    # with what it did: the profile ended before its thread let go.
    assert program_intervals([cpu], 4) == [(0, 9), (9, 19), (19, 30), (31, 34)]


def test_a_profile_that_does_not_fit_is_an_error():
    with pytest.raises(RuntimeError, match=r"6 kernels or programs, which is no multiple of the 4"):
        program_intervals([HOST, GPU], 4)
    with pytest.raises(RuntimeError, match=r"0 kernels"):
        program_intervals([HOST], 1)
