#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the host time of a call from Python up to its launch and breaks it down: one rank, one token, one GPU, and no
dependency except torch.

    PYTHONPATH=python python3 bench/python_host_time.py --json host_time.json
    PYTHONPATH=python python3 bench/python_host_time.py --backend cpu    # Python's part; on the CPU the rest is the call's work

For each call, in microseconds, from single calls between two clock readings:

    whole    the call
    Python   the call with the library's function replaced by a C function that returns at once: Python, torch, ctypes
    C        the library's function alone, called through ctypes with the arguments of the call; without the time of ctypes
    driver   expected time of CUDA in C: number of functions that an enqueue calls (counted in the sources) * time of each

It then measures these functions by themselves on this machine, without ctypes overhead: driver functions (named cu...), runtime
functions (cuda...) and torch functions. The program waits for the GPU every few calls, so it does not measure a full launch
queue. Everything is measured on torch's default stream and again on a separate stream.

A shared host is slow for seconds at a time. The measurements therefore alternate: each round measures 20 calls of each, and a
figure is the median over rounds of the rounds' medians. Next to the figure, the program prints the minimum and maximum over
rounds and, as an indicator of the host's speed, the time that Python takes for a hundred additions.
"""
import argparse
import contextlib
import ctypes
import json
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist

import switchyard as sy
from switchyard import deep_ep
from switchyard._abi.arrays import arrays_of_torch
from switchyard._abi.ffi import bare, library
from switchyard.deep_ep import _copies

#: Results of get_dispatch_layout, named like the parameters of dispatch.
LAYOUT = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")

#: int pthread_equal(a, b) returns 0 for different pointers and ignores further arguments, so it can replace any successful
#: function.
NOTHING = ctypes.cast(ctypes.CDLL(None).pthread_equal, ctypes.c_void_p).value

#: An empty kernel whose parameter has the given number of bytes.
KERNEL = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry empty(.param .align 8 .b8 given[{}]) {{ ret; }}
"""


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--hidden", type=int, default=7168, help="columns of a row, bf16 (7168)")
    parser.add_argument("--experts", type=int, default=256, help="experts in all (256)")
    parser.add_argument("--topk", type=int, default=8, help="experts of a token (8)")
    parser.add_argument("--rounds", type=int, default=50, help="times 20 calls (50)")
    parser.add_argument("--json", metavar="FILE", help="where the figures are written")
    return parser.parse_args()


class Function:
    """A library function as seen by all callers in this process: the address inside each ctypes object is replaced."""

    def __init__(self, name):
        self.name = name
        typed = getattr(library().functions, name)
        self.prototype = ctypes.CFUNCTYPE(ctypes.c_int32, *typed.argtypes)
        self._addresses = [ctypes.c_void_p.from_address(ctypes.addressof(each)) for each in (typed, bare(name))]
        self.address = self._addresses[0].value

    def replace(self, address):
        for each in self._addresses:
            each.value = address

    def restore(self):
        self.replace(self.address)

    def arguments_of(self, call):
        """Returns the arguments passed by `call`, and its result. The memory to which the arguments point must outlive them."""
        given, original = [], self.prototype(self.address)

        def note(*arguments):
            given[:] = arguments
            return original(*arguments)

        noting = self.prototype(note)
        self.replace(ctypes.cast(noting, ctypes.c_void_p).value)
        try:
            kept = call()
        finally:
            self.restore()
        return given, kept


class Figure:
    """Host time of `call` per round, minus that of `nothing`, in microseconds. Not timed: `before` is called before a round's
    calls, `after` after each call, and `behind` at the end."""

    def __init__(self, call, nothing=None, before=None, after=None, behind=None):
        self.call, self.nothing, self.before, self.after, self.behind = call, nothing, before, after, behind
        self.rounds = []

    def take(self, synchronize):
        if self.before:
            self.before()
        try:
            taken = self._batch(self.call, synchronize)
        finally:
            if self.behind:
                self.behind()
        self.rounds.append(taken - self._batch(self.nothing, synchronize) if self.nothing else taken)

    def _batch(self, call, synchronize):
        taken = []
        synchronize()
        for _ in range(20):
            begin = time.perf_counter_ns()
            call()
            taken.append(time.perf_counter_ns() - begin)
            if self.after:
                self.after()
        return statistics.median(taken) / 1e3

    def report(self):
        """The report's figures."""
        return {"us": round(max(statistics.median(self.rounds), 0.0), 3), "least": round(max(min(self.rounds), 0.0), 3),
                "most": round(max(self.rounds), 3)}


def take_turns(figures, rounds, synchronize):
    """The first round is discarded."""
    for number in range(rounds + 1):
        for figure in figures:
            figure.take(synchronize)
            if number == 0:
                figure.rounds.clear()


def hundred_additions():
    total = 0
    for number in range(100):
        total += number
    return total


# CUDA functions called by an enqueue, under their names in Units.
ENQUEUE = {"cuCtxGetCurrent": 1, "cudaEventRecord": 1}  # no address queries, because torch provides the information
POOL = {"cuPointerGetAttributes, 3": 1, "cudaEventRecord": 2}  # for rows in library memory: their end is recorded separately
SIDE = {"cudaStreamGetCaptureInfo": 1, "cudaStreamGetId": 1}  # on streams that support capture
CALLS_OF = {
    "sy_exchange_dispatch_cached": {**ENQUEUE, "launch, 2 KiB": 1},
    "sy_exchange_combine": {**ENQUEUE, "launch, 2 KiB": 1},
    "sy_low_latency_dispatch": {**ENQUEUE, "launch, 2 KiB, dependent": 1},
    "sy_low_latency_combine": {**ENQUEUE, "launch, 2 KiB, dependent": 1},
}


class Units:
    """Host times of individual CUDA and torch functions."""

    def __init__(self, stream, x):
        self.stream, self.x, self.figures = ctypes.c_void_p(stream), x, {}
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.runtime = self._find_runtime()
        self.scratch = ctypes.create_string_buffer(4096)

    @staticmethod
    def _find_runtime():
        """The CUDA runtime loaded by torch."""
        with open("/proc/self/maps", encoding="utf-8") as maps:
            paths = {line.split()[-1] for line in maps if "libcudart.so" in line}
        return ctypes.CDLL(min(paths)) if paths else None

    def do(self, result, what):
        if result:
            raise RuntimeError(f"{what}: error {result} of CUDA")

    def measure(self, name, calls):
        """`calls`: functions with their arguments, all measured as one unit."""
        known = [(function, given) for function, given in calls if function is not None]
        if len(known) < len(calls):
            return
        for function, given in known:
            self.do(function(*given), name)

        def unit():
            for function, given in known:
                function(*given)

        stands_in = []
        for _, given in known:
            kinds = [ctypes.c_int if isinstance(value, int) else ctypes.c_void_p for value in given]
            stands_in.append((ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(NOTHING), given))

        def nothing():
            for function, given in stands_in:
                function(*given)

        self.figures[name] = Figure(unit, nothing)

    def function(self, where, name):
        return getattr(where, name, None) if where is not None else None

    def all(self):
        at = ctypes.byref(self.scratch)
        beyond = [ctypes.byref(self.scratch, 64 * i) for i in range(1, 9)]
        self.contexts(beyond)
        if self.stream.value:
            self.measure("cudaStreamGetCaptureInfo", [(self.capture_info(), (self.stream, at, *beyond[:5]))])
        self.measure("cudaStreamGetId", [(self.function(self.runtime, "cudaStreamGetId"), (self.stream, at))])
        self.pointers(at, beyond)
        self.events()
        self.launches()
        self.torch()
        return self.figures

    def capture_info(self):
        for name in ("cudaStreamGetCaptureInfo_v3", "cudaStreamGetCaptureInfo_v2", "cudaStreamGetCaptureInfo"):
            found = self.function(self.runtime, name)
            if found is not None:
                return found
        return None

    def contexts(self, beyond):
        current = ctypes.c_void_p()
        self.do(self.driver.cuCtxGetCurrent(ctypes.byref(current)), "cuCtxGetCurrent")
        self.measure("(context)", [(self.driver.cuCtxPushCurrent_v2, (current,)), (self.driver.cuCtxPopCurrent_v2, (beyond[0],))])
        self.measure("cuCtxGetCurrent", [(self.driver.cuCtxGetCurrent, (beyond[0],))])

    def pointers(self, at, beyond):
        kinds = (ctypes.c_int * 3)(2, 8, 9)  # kind, managed, index
        into = (ctypes.c_void_p * 3)(*(ctypes.addressof(self.scratch) + 64 * i for i in range(1, 4)))
        pool = ctypes.c_void_p()
        self.do(self.driver.cuMemAllocAsync(ctypes.byref(pool), ctypes.c_size_t(1 << 20), None), "cuMemAllocAsync")
        torch.cuda.synchronize()
        for where, p in (("", ctypes.c_void_p(self.x.data_ptr())), (", pool", pool)):
            self.measure("cudaPointerGetAttributes" + where, [(self.function(self.runtime, "cudaPointerGetAttributes"), (at, p))])
            self.measure("cuPointerGetAttributes, 3" + where, [(self.driver.cuPointerGetAttributes, (3, kinds, into, p))])
            self.measure("cuPointerGetAttribute, kind" + where, [(self.driver.cuPointerGetAttribute, (at, 2, p))])
            self.measure("cuPointerGetAttribute, index" + where, [(self.driver.cuPointerGetAttribute, (at, 9, p))])
            self.measure("cuMemGetAddressRange" + where, [(self.driver.cuMemGetAddressRange_v2, (at, beyond[0], p))])

    def events(self):
        event = ctypes.c_void_p()
        self.do(self.driver.cuEventCreate(ctypes.byref(event), 2), "cuEventCreate")  # without timing
        self.measure("cudaEventRecord", [(self.function(self.runtime, "cudaEventRecord"), (event, self.stream))])
        self.measure("cuEventRecord", [(self.driver.cuEventRecord, (event, self.stream))])
        self.measure("cuStreamWaitEvent", [(self.driver.cuStreamWaitEvent, (self.stream, event, 0))])
        self.measure("cuEventQuery", [(self.driver.cuEventQuery, (event,))])
        self.event = event

    def kernel(self, size):
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        self.do(self.driver.cuModuleLoadData(ctypes.byref(module), KERNEL.format(size).encode()), "cuModuleLoadData")
        self.do(self.driver.cuModuleGetFunction(ctypes.byref(kernel), module, b"empty"), "cuModuleGetFunction")
        return kernel

    def launches(self):
        #: The attribute PROGRAMMATIC_STREAM_SERIALIZATION with value 1.
        attribute = (ctypes.c_uint32 * 18)(6, 0, 1)
        record = (self.driver.cuEventRecord, (self.event, self.stream))
        for size, word in ((64, "64 B"), (2048, "2 KiB"), (3968, "4 KiB")):
            kernel, given = self.kernel(size), ctypes.create_string_buffer(size)
            parameters = (ctypes.c_void_p * 1)(ctypes.addressof(given))
            for dependent in (False, True):
                # CUlaunchConfig: seven numbers, stream, attributes and their number
                config = (ctypes.c_uint64 * 7)(1 | 1 << 32, 1 | 128 << 32, 1 | 1 << 32, 0, self.stream.value or 0,
                                               ctypes.addressof(attribute), int(dependent))
                launch = (self.driver.cuLaunchKernelEx, (ctypes.byref(config), kernel, parameters, None))
                name = f"launch, {word}" + (", dependent" if dependent else "")
                self.measure(name, [launch])
                if size == 2048:
                    self.measure(name + ", and cuEventRecord", [launch, record])

    def torch(self):
        x, raw, fresh = self.x, torch._C._cuda_getCurrentRawStream, arrays_of_torch().rows
        for name, call in {"torch: new_empty of a row": lambda: x.new_empty((1, x.shape[1])),
                           "a fresh row, as calls make it": lambda: fresh(1, x.shape[1], x),
                           "torch: current raw stream": lambda: raw(0),
                           "torch: data_ptr": x.data_ptr, "torch: is_cuda, is_contiguous": lambda: (x.is_cuda, x.is_contiguous())}.items():
            self.figures[name] = Figure(call, lambda: None)


class Calls:
    """The measured calls, each with its library function and the other functions called by it."""

    def __init__(self, given):
        self.given, self.cuda = given, given.backend == "cuda"
        self.device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn((1, given.hidden), generator=generator).bfloat16().to(self.device)
        self.ids = torch.arange(given.topk).reshape(1, given.topk).to(self.device)
        self.weights = torch.rand((1, given.topk), generator=generator).to(self.device)

    def of_drop_in(self, until):
        given, x, ids, weights = self.given, self.x, self.ids, self.weights
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(16, given.hidden, 1, given.experts)
        buffer = deep_ep.Buffer(dist.group.WORLD, 64 << 20, hint, low_latency_mode=True, explicitly_destroy=True, backend=given.backend)
        until.callback(buffer.destroy)
        if not self.cuda:  # including the code for GPUs
            buffer._normal.made = _copies.Generations(buffer.runtime, 64 << 20, {"backend": "cpu"})
        counted = dict(zip(LAYOUT, buffer.get_dispatch_layout(ids, given.experts)))
        rows, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=ids, topk_weights=weights, **counted)
        given_ids = {"topk_idx": ids, "topk_weights": weights, **counted}
        return [("drop-in: dispatch(handle=...)", 15, "sy_exchange_dispatch_cached", (), lambda: buffer.dispatch(x, handle=handle)),
                ("drop-in: combine", 12, "sy_exchange_combine", (), lambda: buffer.combine(rows, handle)),
                *self.of_low_latency(buffer, True), *self.of_low_latency(buffer, False),
                ("drop-in: get_dispatch_layout", None, None, (), lambda: buffer.get_dispatch_layout(ids, given.experts)),
                ("drop-in: dispatch(num_worst_tokens=...)", None, None, (), lambda: buffer.dispatch(x, num_worst_tokens=16, **given_ids)),
                ("drop-in: dispatch, waits for the counts", None, None, (), lambda: buffer.dispatch(x, **given_ids))]

    def of_low_latency(self, buffer, fp8):
        x, ids, weights, experts = self.x, self.ids, self.weights, self.given.experts

        def dispatch():
            return buffer.low_latency_dispatch(x, ids, 16, experts, use_fp8=fp8)

        handle, word = dispatch()[2], "fp8" if fp8 else "bf16"
        y = buffer.get_next_low_latency_combine_buffer(handle)
        return [(f"drop-in: low_latency_dispatch, {word}", 12, "sy_low_latency_dispatch", (), dispatch),
                (f"drop-in: low_latency_combine, {word}", 12, "sy_low_latency_combine", (),
                 lambda: buffer.low_latency_combine(y, ids, weights, handle))]

    #: Additional functions that a dispatch calls if it delivers into the library's memory.
    DELIVERS = ("sy_dispatched_get", "sy_dispatched_destroy")

    def of_package(self, until):
        given, x, ids, weights = self.given, self.x, self.ids, self.weights
        shape = {"hidden": given.hidden, "num_experts": given.experts, "topk": given.topk, "max_tokens": 16, "dtype": "bf16"}
        normal = {**shape, "pool_bytes": 16 << 20}  # several outputs exist at a time
        heap = sy.Exchange.heap_bytes(1, backend=given.backend, **normal) + sy.LowLatency.heap_bytes(1, **shape)
        group = until.enter_context(sy.Group.from_process_group(dist.group.WORLD, heap, backend=given.backend))
        exchange, fast = sy.Exchange(group, **normal), sy.LowLatency(group, **shape)
        rows, handle = exchange.dispatch(x, ids)
        received = fast.dispatch(x, ids, weights)
        y = fast.make_rows(received)
        out = torch.empty_like(rows)
        return [("Exchange.dispatch(handle=..., out=...)", 15, "sy_exchange_dispatch_cached", (),
                 lambda: exchange.dispatch(x, handle=handle, out=out)),
                ("Exchange.dispatch(handle=...)", 15, "sy_exchange_dispatch_cached", self.DELIVERS,
                 lambda: exchange.dispatch(x, handle=handle)),
                ("Exchange.combine", 12, "sy_exchange_combine", (), lambda: exchange.combine(rows, handle)),
                ("LowLatency.dispatch", 12, "sy_low_latency_dispatch", (), lambda: fast.dispatch(x, ids, weights)),
                ("LowLatency.combine", 12, "sy_low_latency_combine", (), lambda: fast.combine(y, received))]


class Measured:
    """A call with its figures and those of its parts. Without a library `function`, the parts are unknown."""

    def __init__(self, name, bar, function, others, call):
        self.name, self.bar, self.call, self.others, self.whole, self.function = name, bar, call, others, Figure(call), None
        if function is None:
            return
        self.function, self.rest, self.functions = Function(function), [Function(other) for other in others], CALLS_OF[function]
        self.given, self.kept = self.function.arguments_of(call)
        enqueue, nothing = self.function.prototype(self.function.address), self.function.prototype(NOTHING)
        self.in_python = Figure(call, before=self.replace, behind=self.restore)
        self.in_c = Figure(lambda: enqueue(*self.given), before=self.know, after=self.give_back)
        self.by_ctypes = Figure(lambda: nothing(*self.given))

    def know(self):
        """Stores the arguments. The memory to which they point is valid only until any other call is made."""
        self.given, self.kept = self.function.arguments_of(self.call)

    def give_back(self):
        """Releases the results that a dispatch delivered into the library's memory."""
        if self.function.name == "sy_exchange_dispatch_cached" and self.given[4]:
            library().functions.sy_dispatched_destroy(ctypes.c_void_p.from_address(self.given[4]).value)

    def replace(self):
        self.kept = self.call()  # keeps results valid while nothing is called
        for each in (self.function, *self.rest):
            each.replace(NOTHING)

    def restore(self):
        for each in (self.function, *self.rest):
            each.restore()

    def figures(self):
        return [self.whole, *((self.in_python, self.in_c, self.by_ctypes) if self.function else ())]

    def report(self, units, stream, where):
        found = {"stream": where, "name": self.name, **self.whole.report(), **({} if self.bar is None else {"bar": self.bar})}
        if self.function is None:
            return found
        functions = {**self.functions, **(SIDE if stream else {}), **(POOL if self.others else {})} if units else {}
        driver = sum(units[unit].report()["us"] * number for unit, number in functions.items() if unit in units)
        c = max(self.in_c.report()["us"] - self.by_ctypes.report()["us"], 0.0)
        return {**found, "python": self.in_python.report()["us"], "c": round(c, 3), "driver": round(driver, 3), "functions": functions}


def print_figures(where, report):
    """Prints the figures for one stream."""
    columns = ("us", "least", "most", "bar", "python", "c", "driver")
    print(f"\n{where:42}" + "".join(f" {name:>7}" for name in ("whole", *columns[1:])))
    for each in report:
        if "name" in each:
            print(f"{each['name']:42}" + "".join(f" {each[column]:7.2f}" if column in each else 8 * " " for column in columns))
    print(f"\n{where}: functions by themselves")
    for each in report:
        if "unit" in each:
            print("  {unit:50} {us:7.2f} {least:7.2f} {most:7.2f}".format(**each))


def measure_all(given, calls, stream, where):
    """Measures and prints the figures for one stream."""
    synchronize = torch.cuda.synchronize if calls.cuda else lambda: None
    with contextlib.ExitStack() as until_measured:
        measured = [Measured(*each) for each in (*calls.of_drop_in(until_measured), *calls.of_package(until_measured))]
        units, host = Units(stream, calls.x).all() if calls.cuda else {}, Figure(hundred_additions)
        take_turns([host, *(figure for each in measured for figure in each.figures()), *units.values()], given.rounds, synchronize)
        report = [each.report(units, stream, where) for each in measured]
        synchronize()
        measured.clear()  # before the objects that they refer to are destroyed
    report.append({"stream": where, "unit": "Python: a hundred additions", **host.report()})
    report += [{"stream": where, "unit": name, **figure.report()} for name, figure in units.items()]
    print_figures(where, report)
    return report


def main():
    given = arguments()
    cuda = given.backend == "cuda"
    if cuda:
        torch.cuda.set_device(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{os.path.join(folder, 'store')}", rank=0, world_size=1)
        calls = Calls(given)
        figures = measure_all(given, calls, 0, "default stream")
        if cuda:
            own = torch.cuda.Stream()
            torch.cuda.synchronize()
            with torch.cuda.stream(own):
                figures += measure_all(given, calls, own.cuda_stream, "stream of its own")
        dist.destroy_process_group()
    if given.json:
        about = {"device": torch.cuda.get_device_name() if cuda else "cpu", "torch": torch.__version__, "library": sy.library_version(),
                 "date": time.strftime("%Y-%m-%d"), "config": {name: value for name, value in vars(given).items() if name != "json"}}
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump({**about, "figures": figures}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
