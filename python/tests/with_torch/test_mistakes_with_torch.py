# SPDX-License-Identifier: Apache-2.0
"""Usage mistakes with torch tensors, and with functions that need torch or a GPU, in the form of package/test_mistakes.py."""
import ctypes
import types

import pytest

torch = pytest.importorskip("torch")

import switchyard as sy  # noqa: E402
from mistakes import Judge  # noqa: E402
from switchyard import gemm as _gemm  # noqa: E402
from switchyard._abi import structs  # noqa: E402
from switchyard.handle import Handle  # noqa: E402
from switchyard.low_latency import Received  # noqa: E402

judge = Judge("torch")
T = "torch.ones(3, 128)"
MISTAKES = [
    (f"ex.dispatch({T}.to_sparse(), IDS)", "InvalidArgument", "x"),
    (f"ex.dispatch({T}.to_sparse_csr(), IDS)", "InvalidArgument", "x"),
    (f"ex.dispatch({T}.to('meta'), IDS)", "InvalidArgument", "x"),
    (f"ex.dispatch({T}.double(), IDS)", "InvalidArgument", "x"),
    ("ex.dispatch(torch.ones(3, 256)[:, ::2], IDS)", "InvalidArgument", "x"),
    ("ex.dispatch(torch.ones(128).expand(3, 128), IDS)", "InvalidArgument", "x"),
    ("ex.dispatch(torch.ones(128, 3).T, IDS)", "InvalidArgument", "x"),
    ("ex.dispatch(torch.ones(3, 128, dtype=torch.complex64), IDS)", "InvalidArgument", "x"),
    (f"ex.dispatch({T}, torch.zeros(3, 2, dtype=torch.int16))", "InvalidArgument", "topk_ids"),
    (f"ex.dispatch({T}, torch.zeros(3, 2))", "InvalidArgument", "topk_ids"),
    (f"ex.dispatch({T}, torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2).half())", "InvalidArgument", "topk_weights"),
    (f"half.dispatch({T}, torch.zeros(3, 2, dtype=torch.int64))", "InvalidArgument", "x"),
    ("(lambda x: ex.dispatch(x, torch.zeros(3, 2, dtype=torch.int64), out=x))(torch.ones(3, 128))", "InvalidArgument", "out"),
    ("(lambda x: [ex.dispatch(x, handle=handle, out=x.clone()) for _ in range(3)] and ex.dispatch(x, handle=handle, out=x))(torch.ones(3, 128))",
     "InvalidArgument", "out"),
    ("(lambda a: ex.combine(a[:3], handle, out=a[2:]))(torch.ones(5, 128))", "InvalidArgument", "out"),
    ("(lambda y: ex.combine(y, handle, out=torch.from_numpy(y.numpy())))(torch.ones(3, 128))", "InvalidArgument", "out"),
    (f"ex.combine({T}, handle, bias={T}.double())", "InvalidArgument", "bias"),
    ("ll.dispatch(torch.ones(3, 128), torch.zeros(3, 2, dtype=torch.int64), output=3)", "InvalidType", "output"),
    ("[ll.dispatch(torch.ones(3, 128), torch.zeros(3, 2, dtype=torch.int64)) for _ in range(3)] and "
     "ll.dispatch(torch.ones(3, 128), torch.zeros(3, 2, dtype=torch.int64), output=rows)", "InvalidType", "output"),
    ("ex.dispatch(type('Foreign', (), {'__dlpack__': lambda self, **_: torch.ones(3, 128).bfloat16().__dlpack__(), "
     "'__dlpack_device__': lambda self: (1, 0)})(), IDS)", "InvalidArgument", "x"),
    ("ex.combine(rows, handle, num_sms=torch.ones(2))", "InvalidType", "num_sms"),
    ("sy.Exchange(group, **{**SHAPE, 'hidden': torch.tensor([1, 2])})", "InvalidType", "hidden"),
    ("sy.GroupedGemm(torch.ones(2, 128, 128).bfloat16())", "InvalidArgument", "weights"),
    ("sy.MoeLayer(group, W13, W2, intermediate_scale=torch.ones(1).half(), **LAYER)", "InvalidArgument", "intermediate_scale"),
    ("sy.MoeLayer(group, W13, W2, intermediate_scale=torch.ones(1, device='meta'), **LAYER)", "InvalidArgument", "intermediate_scale"),
    ("layer.with_weights(W13, W2, intermediate_scale=torch.ones(2))", "InvalidArgument", "intermediate_scale"),
    ("layer.with_weights(W13, W2, intermediate_scale=torch.ones(1))", "InvalidArgument", "intermediate_scale is given"),
    ("sy.parallelize_moe(torch.nn.Linear(2, 2), group, max_tokens='8')", "InvalidType", "max_tokens"),
    ("sy.parallelize_moe(torch.nn.Linear(2, 2), 2, max_tokens=8)", "InvalidType", "group"),
    ("sy.parallelize_moe(torch.nn.Linear(2, 2), group, max_tokens=8, topk=1, experts='all')", "InvalidArgument", "experts"),
    ("sy.moe_heap_bytes(torch.nn.Linear(2, 2), '2', max_tokens=8)", "InvalidType", "world"),
    ("sy.moe_heap_bytes(torch.nn.Linear(2, 2), 2, max_tokens=8, hosts=0)", "InvalidArgument", "hosts"),
    ("sy.parallelize_moe(torch.nn.Linear(2, 2), group, max_tokens=8, gradients='average')", "InvalidArgument", "gradients"),
    ("sy.expert_parameters(5)", "InvalidType", "model"),
    ("sy.full_state_dict('model')", "InvalidType", "model"),
    ("sy.keep_out_of_ddp(None)", "InvalidType", "model"),
    ("group.record_stream(5)", "InvalidType", "tensor"),
    ("group.record_stream(torch.ones(2), 'side')", "InvalidType", "stream"),
]


@pytest.fixture(scope="module", autouse=True)
def _judge():
    yield
    judge.close()


@pytest.mark.parametrize("expression, exception, word", MISTAKES, ids=[each[0] for each in MISTAKES])
def test_mistakes(expression, exception, word):
    name, text, _ = judge.ask(expression)
    if name == "LibraryNotFound":
        pytest.skip(text)
    assert name == exception and f"{word}" in text, f"{name}: {text}"


# ---- GroupedGemm: its products need a GPU, its checks do not ----

ROWS, EXPERTS, HIDDEN, WIDE = 12, 4, 512, 512


@pytest.fixture
def product(monkeypatch):
    """A product of fp8 weights on CPU tensors, with a library that only records calls, and the handle of a dispatch of 12
    rows."""
    calls = []

    def output(config, columns, dtype):
        columns._obj.value, dtype._obj.value = WIDE, 3
        return 0

    functions = types.SimpleNamespace(
        sy_grouped_gemm_output=output, sy_grouped_gemm_create=lambda *_: setattr(_[3]._obj, "value", 64) or 0, sy_grouped_gemm_destroy=lambda *_: 0,
        sy_expert_rows_of_dispatched=lambda *_: 0, sy_expert_rows_of_low_latency=lambda *_: 0, sy_grouped_gemm_run=lambda *given: calls.append(given) or 0)
    monkeypatch.setattr(_gemm, "CUDA", 0)
    monkeypatch.setattr(_gemm, "layer_library", lambda: types.SimpleNamespace(functions=functions))
    monkeypatch.setattr(_gemm._arguments, "bind", lambda name, backend, bind=_gemm._arguments.bind: bind(name, 0))
    weights = torch.zeros(EXPERTS, 2 * WIDE, HIDDEN).to(torch.float8_e4m3fn)
    up = sy.GroupedGemm(weights, scales=torch.ones(EXPERTS, 2 * WIDE // 128, HIDDEN // 128), epilogue="swiglu", quantize="f32")
    handle = Handle.__new__(Handle)
    handle._view = structs.DispatchedView(rows=ROWS, x_rows=ROWS)
    yield up, handle, calls
    assert ctypes  # keeps the structs alive up to this point


def fp8(rows, columns):
    return torch.zeros(rows, columns).to(torch.float8_e4m3fn)


def right():
    return {"x": (fp8(ROWS, HIDDEN), torch.ones(ROWS, 4)), "out": (fp8(ROWS, WIDE), torch.empty(ROWS, 4))}


@pytest.mark.parametrize("change, word", [
    (lambda g: {"out": (g["out"][0], torch.zeros(4, 4))}, "scales of out"),
    (lambda g: {"out": (g["out"][0], torch.zeros(ROWS, 4).half())}, "scales of out"),
    (lambda g: {"out": (g["out"][0], torch.zeros(ROWS, 8)[:, ::2])}, "scales of out"),
    (lambda g: {"out": (g["out"][0], torch.zeros(ROWS, 4, device="meta"))}, "scales of out"),
    (lambda g: {"out": g["out"][0]}, "out"),
    (lambda g: {"out": (fp8(ROWS - 1, WIDE), torch.zeros(ROWS, 4))}, "out"),
    (lambda g: {"out": (g["x"][0], torch.zeros(ROWS, 4))}, "out"),
    (lambda g: {"out": (g["out"][0], g["x"][1])}, "scales of out"),
    (lambda g: {"x": (g["x"][0], torch.ones(8, 4))}, "scales of x"),
    (lambda g: {"x": (g["x"][0], torch.ones(ROWS, 3))}, "scales of x"),
    (lambda g: {"x": (g["x"][0], torch.ones(ROWS, 16).half())}, "scales of x"),
    (lambda g: {"x": (g["x"][0], torch.ones(ROWS, 4, device="meta"))}, "scales of x"),
    (lambda g: {"x": (g["x"][0], 1.0)}, "scales of x"),
    (lambda g: {"x": g["x"][0]}, "x"),
    (lambda g: {"x": (fp8(ROWS - 1, HIDDEN), torch.ones(ROWS - 1, 4))}, "x"),
    (lambda g: {"x": (torch.zeros(ROWS, HIDDEN), torch.ones(ROWS, 4))}, "x"),
    (lambda g: {"num_sms": "2"}, "num_sms"),
    (lambda g: {"rows": torch.ones(3)}, "rows"),
])
def test_products(product, change, word):
    up, handle, calls = product
    given = right()
    up(given["x"], handle, out=given["out"])
    assert len(calls) == 1
    arguments = {"rows": handle, **given, **change(given)}
    with pytest.raises(sy.InvalidArgument, match=rf"^{word}\b"):
        up(arguments.pop("x"), arguments.pop("rows"), **arguments)
    assert len(calls) == 1  # the library was not called


def test_scales_of_weights(product):
    weights = torch.zeros(EXPERTS, 2 * WIDE, HIDDEN).to(torch.float8_e4m3fn)
    for scales in (torch.ones(EXPERTS, 7, 4), torch.ones(EXPERTS, 8, 5), torch.ones(EXPERTS, 8, 4).half(), torch.ones(EXPERTS, 4, 8).transpose(1, 2)):
        with pytest.raises(sy.InvalidArgument, match="^scales "):
            sy.GroupedGemm(weights, scales=scales, epilogue="swiglu")
    with pytest.raises(sy.InvalidArgument, match="^scales: "):
        sy.GroupedGemm(weights)
    with pytest.raises(sy.InvalidType, match="^limit = "):
        sy.GroupedGemm(weights, scales=torch.ones(EXPERTS, 8, 4), limit="7")


# ---- scales per channel ----

class Channels:
    """Products with one scale per row and output, on CPU tensors, and what the recording library is given."""

    def __init__(self, calls):
        self.calls, self.weights = calls, torch.zeros(EXPERTS, 2 * WIDE, HIDDEN).to(torch.float8_e4m3fn)
        self.handle = Handle.__new__(Handle)
        self.handle._view = structs.DispatchedView(rows=0, x_rows=ROWS)

    def product(self, output_scaling, **changed):
        config = {"scales": torch.ones(EXPERTS, 2 * WIDE), "epilogue": "swiglu", "quantize": "f32", "scaling": "per_channel", **changed}
        return sy.GroupedGemm(self.weights, output_scaling=output_scaling, **config)

    def run(self, product, x, rows=None, **arguments):
        """Returns the result and, of the call, the rows, where they are, the outputs and the options."""
        before = len(self.calls)
        result = product(x, self.handle if rows is None else rows, **arguments)
        assert len(self.calls) == before + 1
        return (result, *(each._obj for each in self.calls[-1][1:5]))


@pytest.fixture
def channels(product):
    return Channels(product[2])


def test_places_of_row_scales(channels):
    """A row's scale is the first of its row of scales, which is passed as it is if it has the width of a dispatch's."""
    up = channels.product("fixed")
    one = torch.tensor([0.5])
    all_scales = torch.arange(1, 8 * ROWS + 1, dtype=torch.float32).reshape(ROWS, 8)
    for scales, stride, in_place in ((all_scales[:, 0].contiguous(), 1, True), (all_scales[:, 0], 1, False), (all_scales[:, :1], 1, False),
                                     (all_scales[:, :4].contiguous(), 4, True), (all_scales[:, :4], 4, False), (all_scales[:, :3], 1, False),
                                     (all_scales, 1, False)):
        seen = []
        up._functions.sy_grouped_gemm_run = lambda *given: seen.extend(  # reads the scales while they are alive
            (ctypes.c_float * ((ROWS - 1) * given[2]._obj.scale_stride + 1)).from_address(given[1]._obj.scales)) or channels.calls.append(given) or 0
        (out, out_scales), given, where, result, options = channels.run(up, (fp8(ROWS, HIDDEN), scales), output_scale=one)
        assert where.scale_stride == stride and where.scale_rows == 0 and given.scale_kind == 1 and given.rows == ROWS
        assert seen[::stride] == all_scales[:, 0].tolist()
        assert (given.scales == scales.data_ptr()) is in_place
        assert out.shape == (ROWS, WIDE) and out_scales.shape == (ROWS, 1) and result.scales == out_scales.data_ptr()
        assert options.output_scale == one.data_ptr() and not options.scratch


def test_scratch_of_rows_with_one_scale(channels):
    for scaling, has_scratch in (("per_row", True), ("per_group", False)):
        (_, out_scales), _, where, _, options = channels.run(channels.product(scaling), (fp8(ROWS, HIDDEN), torch.ones(ROWS)))
        assert where.scale_stride == 1 and bool(options.scratch) is has_scratch and not options.output_scale
        assert out_scales.shape == (ROWS, 1 if has_scratch else WIDE // 128)


def test_row_scales_of_low_latency(channels):
    received = Received.__new__(Received)
    received.x, received._view = torch.empty(EXPERTS, ROWS, 1), structs.LowLatencyView()
    x = fp8(EXPERTS * ROWS, HIDDEN).reshape(EXPERTS, ROWS, HIDDEN)
    for scales, stride in ((torch.ones(EXPERTS, ROWS), 1), (torch.ones(EXPERTS, ROWS, 1), 1), (torch.ones(EXPERTS, ROWS, 4), 4),
                           (torch.ones(EXPERTS, ROWS, 8)[..., :3], 1)):
        (out, out_scales), given, where, _, options = channels.run(channels.product("per_row"), (x, scales), received)
        assert where.scale_stride == stride and given.rows == EXPERTS * ROWS and options.scratch
        assert out.shape == (EXPERTS, ROWS, WIDE) and out_scales.shape == (EXPERTS, ROWS, 1)


def test_no_rows_with_one_scale(channels):
    for shape in ((0,), (0, 1), (0, 4)):
        (out, out_scales), given, _, _, options = channels.run(channels.product("per_row"), (fp8(0, HIDDEN), torch.ones(shape)))
        assert given.rows == 0 and not options.scratch and out.shape == (0, WIDE) and out_scales.shape == (0, 1)


@pytest.mark.parametrize("change, word", [
    (lambda g: {"x": (g["x"][0], torch.ones(ROWS - 1))}, "scales of x"),
    (lambda g: {"x": (g["x"][0], torch.ones(ROWS - 1, 4))}, "scales of x"),
    (lambda g: {"x": (g["x"][0], torch.ones(ROWS, 0))}, "scales of x"),
    (lambda g: {"x": (g["x"][0], torch.ones(1, ROWS, 4))}, "scales of x"),
    (lambda g: {"x": (g["x"][0], torch.ones(ROWS).half())}, "scales of x"),
    (lambda g: {"x": (g["x"][0], torch.ones(ROWS, 4, dtype=torch.uint8))}, "scales of x"),
    (lambda g: {"x": (g["x"][0], torch.ones(ROWS, device="meta"))}, "scales of x"),
    (lambda g: {"x": (g["x"][0], 1.0)}, "scales of x"),
    (lambda g: {"output_scale": torch.ones(2)}, "output_scale"),
    (lambda g: {"output_scale": torch.ones(1).half()}, "output_scale"),
    (lambda g: {"output_scale": torch.ones(1, device="meta")}, "output_scale"),
    (lambda g: {"output_scale": 0.5}, "output_scale"),
    (lambda g: {"out": (g["out"][0], torch.empty(ROWS))}, "scales of out"),
    (lambda g: {"out": (g["out"][0], torch.empty(ROWS, 4))}, "scales of out"),
    (lambda g: {"output_scale": g["out"][1][3]}, "scales of out shares memory with output_scale"),
    (lambda g: {"output_scale": g["out"][0][3, 8:12].view(torch.float32)}, "out shares memory with output_scale"),
])
def test_products_per_channel(channels, change, word):
    up = channels.product("fixed")
    given = {"x": (fp8(ROWS, HIDDEN), torch.ones(ROWS)), "out": (fp8(ROWS, WIDE), torch.empty(ROWS, 1)), "output_scale": torch.ones(1)}
    channels.run(up, **given)
    with pytest.raises(sy.InvalidArgument, match=rf"^{word}\b"):
        up(rows=channels.handle, **{**given, **change(given)})
    assert len(channels.calls) == 1  # the library was not called


def test_scale_that_needs_a_gradient(channels):
    with pytest.raises(sy.Unsupported, match="output_scale requires a gradient"):
        channels.run(channels.product("fixed"), (fp8(ROWS, HIDDEN), torch.ones(ROWS)), output_scale=torch.ones(1, requires_grad=True))
    assert not channels.calls


def test_scales_of_channels(channels):
    for scales in (torch.ones(EXPERTS, 2 * WIDE - 1), torch.ones(EXPERTS - 1, 2 * WIDE), torch.ones(EXPERTS, 2 * WIDE // 128, HIDDEN // 128),
                   torch.ones(EXPERTS, 2 * WIDE).half(), torch.ones(2 * WIDE, EXPERTS).T, torch.ones(EXPERTS, 2 * WIDE, device="meta")):
        for scaling in ("per_channel", "group_channel"):
            with pytest.raises(sy.InvalidArgument, match="^scales "):
                channels.product("per_group", scaling=scaling, scales=scales)
    for name in ("scaling", "output_scaling"):
        with pytest.raises(sy.InvalidArgument, match=f"^{name} = 'per_column': must be "):
            sy.GroupedGemm(channels.weights, scales=torch.ones(EXPERTS, 2 * WIDE), **{name: "per_column"})
