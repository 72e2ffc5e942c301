"""A kernel is launched past Triton's binding of arguments, but only as Triton compiled it for such arguments."""

from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.nvidia import driver as nvidia
from triton.runtime.errors import OutOfResources

from deltalab.kernels import compilations
from deltalab.kernels.compilations import Launcher, Tile, launch


class Kernel:
    """Stands for a kernel of Triton: notes what it compiles, and what its own launcher gets."""

    arg_names = ("x", "y", "scale", "n", "SIZE")

    def __init__(self, kinds: list[Any] | None = None) -> None:
        self.by_triton: list[dict[str, Any]] = []
        self.by_launcher: list[tuple[Any, ...]] = []
        self.kinds = kinds

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        def run(**given: Any) -> Any:
            self.by_triton.append(given)
            metadata = SimpleNamespace(tensordesc_meta=self.kinds)
            return SimpleNamespace(function="function", packed_metadata="packed", run=Run(self), metadata=metadata)

        return run


class Run:
    """Like Triton's launcher of a compiled kernel: `launch` makes parts of descriptors and calls another launcher."""

    def __init__(self, kernel: Kernel) -> None:
        self.launch = wrapped(lambda *args: kernel.by_launcher.append(args))

    def __call__(self, *args: Any) -> None:
        self.launch(*args)


def wrapped(launcher: Callable[..., None]) -> Callable[..., None]:
    def inner(*args: Any) -> None:
        assert not any(isinstance(argument, Tile) for argument in args)
        launcher(*args)

    return inner


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: "stream")
    monkeypatch.setattr(compilations, "INTERPRETED", False)
    monkeypatch.setattr(compilations, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(compilations, "_hooks", lambda: None)

    def parts(tile: Any, kind: Any) -> list[Any]:
        return [f"map of {kind}", *tile.shape, *tile.strides]

    monkeypatch.setattr(nvidia, "make_tensordesc_arg", parts)


def given(**changes: Any) -> dict[str, Any]:
    return {"y": None, "x": torch.zeros(64), "scale": 0.5, "n": 3, **changes}


def test_the_second_launch_of_a_kind_goes_past_triton() -> None:
    kernel = Kernel()
    run = Launcher(kernel, {"SIZE": 16}, {"num_warps": 4})
    first, second = given(), given(scale=2.0)
    run((2,), first)
    run((5, 6), second)
    assert kernel.by_triton == [{**first, "SIZE": 16, "num_warps": 4}]
    assert kernel.by_launcher == [
        (5, 6, 1, "stream", "function", "packed", None, None, None, second["x"], None, 2.0, 3, 16)
    ]


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.zeros(64, dtype=torch.bfloat16)},
        {"x": torch.zeros(64)[1:]},
        {"y": torch.zeros(64)},
        {"x": None},
        {"n": 4},
        {"scale": 1},
        {"x": (torch.zeros(64), None)},
    ],
    ids=["dtype", "alignment", "given", "None", "number", "type", "tuple"],
)
def test_arguments_of_another_kind_are_compiled_for(other: dict[str, Any]) -> None:
    kernel = Kernel()
    run = Launcher(kernel, {"SIZE": 16}, {})
    run((1,), given())
    run((1,), given(**other))
    assert len(kernel.by_triton) == 2
    run((1,), given(**other))
    run((1,), given())
    assert (len(kernel.by_triton), len(kernel.by_launcher)) == (2, 2)


def test_tiles_become_the_parts_of_a_descriptor_once_for_each_place(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = Kernel(kinds=["bf16", "fp32"])
    run = Launcher(kernel, {"SIZE": 16}, {})
    x, y = torch.zeros(64, 16, dtype=torch.bfloat16), torch.zeros(32, 32)
    operands = given(x=Tile(x, 16, (16, 16)), y=Tile(y, 32, (16, 16)))
    run((1,), operands)
    assert [tuple(kernel.by_triton[0][name].shape) for name in ("x", "y")] == [(64, 16), (32, 32)]
    run((1,), operands)
    monkeypatch.setattr(nvidia, "make_tensordesc_arg", lambda *_: pytest.fail("the parts are known"))
    run((1,), {**operands, "x": Tile(x, 16, (16, 16))})
    parts = ("map of bf16", 64, 16, 16, 1, "map of fp32", 32, 32, 32, 1)
    assert [args[9:] for args in kernel.by_launcher] == [(*parts, 0.5, 3, 16)] * 2


def test_a_tile_of_another_shape_is_compiled_for() -> None:
    kernel, x = Kernel(kinds=["bf16"]), torch.zeros(64, 16)
    run = Launcher(kernel, {"SIZE": 16}, {})
    for block in ((16, 16), (32, 16), (16, 16), (32, 16)):
        run((1,), given(x=Tile(x, 16, block)))
    assert (len(kernel.by_triton), len(kernel.by_launcher)) == (2, 2)


def test_a_descriptor_begins_at_16_bytes() -> None:
    x = torch.arange(65.0)[1:]
    tile = Tile(x, 16, (4, 16))
    assert tile.place[0] % 16 == 0
    assert tile.place[0] != x.data_ptr()
    torch.testing.assert_close(tile.descriptor().base.flatten(), x)


def test_a_triton_that_launches_otherwise_launches_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nvidia, "make_tensordesc_arg")
    kernel = Kernel(kinds=["bf16"])
    run = Launcher(kernel, {"SIZE": 16}, {})
    for _ in range(3):
        run((1,), given(x=Tile(torch.zeros(64, 16), 16, (16, 16))))
    assert (len(kernel.by_triton), len(kernel.by_launcher)) == (3, 0)


def test_a_profilers_hook_sees_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilations, "_hooks", lambda: [print])
    kernel = Kernel()
    for _ in range(3):
        launch(kernel, (1,), given(), {"SIZE": 16})
    assert (len(kernel.by_triton), len(kernel.by_launcher)) == (3, 0)


def test_a_gpu_with_less_shared_memory_takes_fewer_stages() -> None:
    taken = []

    class Narrow(Kernel):
        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            def run(**arguments: Any) -> Any:
                taken.append(arguments["num_stages"])
                if arguments["num_stages"] > fitting:
                    raise OutOfResources(104 * 1024, 99 * 1024, short)
                return super(Narrow, self).__getitem__(grid)(**arguments)

            return run

    fitting, short = 1, "shared memory"
    run = Launcher(Narrow(), {"SIZE": 16}, {"num_warps": 4, "num_stages": 3})
    run((2,), given())
    assert taken == [3, 2, 1]
    run((2,), given(y=torch.zeros(64)))
    assert taken == [3, 2, 1, 1], "what did not fit is not tried again"
    fitting = 0
    with pytest.raises(OutOfResources):
        Launcher(Narrow(), {"SIZE": 16}, {"num_stages": 2})((2,), given())
    fitting, short = 1, "threads"
    with pytest.raises(OutOfResources):
        Launcher(Narrow(), {"SIZE": 16}, {"num_stages": 2})((2,), given())


def test_this_triton_is_one_that_we_know() -> None:
    launcher = object()
    wrap = nvidia.wrap_handle_tensordesc
    assert compilations._inner(wrap(launcher, {0: "tensordesc<fp16[16, 16]>"}, [{}])) is launcher


def test_processes_compile_the_same_kernel_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that compiles another kernel waits for nobody."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    fork = get_context("fork")
    held, ended = fork.Event(), fork.Event()

    def hold() -> None:
        with compilations._one_at_a_time("scan of 64"):
            held.set()
            ended.wait(60)

    def compile_after(kernel: str, order: Any) -> None:
        with compilations._one_at_a_time(kernel):
            order.put(kernel)

    order = fork.Queue()
    first = fork.Process(target=hold)
    first.start()
    assert held.wait(60)
    same, other = (fork.Process(target=compile_after, args=(name, order)) for name in ("scan of 64", "scan of 32"))
    same.start()
    other.start()
    assert order.get(timeout=60) == "scan of 32"
    other.join()
    same.join(0.2)
    assert same.is_alive()
    first.kill()  # The system releases its lock.
    assert order.get(timeout=60) == "scan of 64"
    same.join()


def test_a_cache_that_cannot_be_written_stops_no_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    kernel = Kernel()
    Launcher(kernel, {"SIZE": 16}, {})((1,), given())
    assert len(kernel.by_triton) == 1
