# SPDX-License-Identifier: Apache-2.0
import json

import numpy as np
import pytest

import switchyard as sy

SHAPE = {"num_experts": 4, "topk": 2, "hidden": 16, "max_tokens": 6}


def test_a_timeline(ranks, tmp_path):
    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        x, ids = np.ones((6, 16), np.float32), np.arange(12).reshape(6, 2) % 4
        trace = sy.Trace(group, events_per_track=1000)
        with trace:
            for _ in range(3):
                rows, handle = exchange.dispatch(x, ids)
                with trace.span("experts", len(rows), "rows"):
                    y = rows * 2
                exchange.combine(y, handle)
        exchange.dispatch(x, ids)  # not recorded
        mine = {(p.name, p.rank): p for p in trace.summary()}
        assert mine["dispatch", group.rank].spans == 3 and ("dispatch", 1 - group.rank) not in mine
        experts = mine["experts", group.rank]
        assert (experts.spans, experts.unit, experts.category, experts.arg_sum) == (3, "rows", "user", 18)
        trace.gather()
        everything = {(p.name, p.rank): p for p in trace.summary()}
        assert all(everything[name, r].spans == 3 for name in ("dispatch", "combine", "experts") for r in (0, 1))
        assert everything["send_rows", 1 - group.rank].bytes > 0
        assert trace.lost == 0 and trace.clock_error_ns == 0
        path = tmp_path / f"trace{group.rank}.json"
        trace.write_json(path)
        # Each reading queries the clock again, so times may differ by a nanosecond.
        written, text = json.loads(path.read_text(encoding="utf-8")), json.loads(trace.json())
        assert written.keys() == text.keys()
        timeless = [[{k: v for k, v in event.items() if k not in ("ts", "dur")} for event in of["traceEvents"] if event["ph"] == "X"]
                    for of in (written, text)]
        assert sorted(map(repr, timeless[0])) == sorted(map(repr, timeless[1]))
        names = {event.get("name") for event in text["traceEvents"]}
        assert {"dispatch", "combine", "experts", "send_rows"} <= names
        trace.clear()
        assert trace.summary() == []

    ranks(rank, 2, workers=2)


def test_a_trace_may_go_first(ranks):
    def rank(group):
        exchange = sy.Exchange(group, dtype="f32", **SHAPE)
        sy.Trace(group).start()
        for _ in range(2):
            exchange.dispatch(np.ones((6, 16), np.float32), np.zeros((6, 2), np.int64))
        with pytest.raises(sy.FileError, match="/nowhere"):
            sy.Trace(group).write_json("/nowhere/trace.json")
        with pytest.raises(sy.InvalidArgument):
            sy.Trace(group).merge(b"nothing")

    ranks(rank, 2)
