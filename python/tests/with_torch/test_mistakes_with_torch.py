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
