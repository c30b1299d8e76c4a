# SPDX-License-Identifier: Apache-2.0
import pytest

import switchyard as sy

SHAPE = {"ranks": 2, "hidden": 1024, "max_tokens": 32}


def test_values_of_a_file(tmp_path, monkeypatch):
    path = tmp_path / "my.tuning"
    path.write_text('switchyard-tuning 1\ndevice="cpu" mode=low_latency ranks=2 hidden=1024 tokens=32 pieces=3\n'
                    'device="My GPU" mode=normal ranks=2 hidden=1024 tokens=32 dispatch_sms=7 combine_warps=5\n')
    assert sy.tuned_values("cpu", "low_latency", path=path, **SHAPE).pieces == 3
    values = sy.tuned_values("My GPU", "normal", path=str(path), ranks=4, hidden=2048, max_tokens=64)
    assert (values.dispatch_sms, values.combine_warps, values.pieces) == (7, 5, 0)
    assert not any(sy.tuned_values("cpu", "flat", path=path, **SHAPE))
    monkeypatch.setenv("SWITCHYARD_TUNING", str(path))
    assert sy.tuned_values("cpu", "low_latency", **SHAPE).pieces == 3
    path.write_text("switchyard-tuning 1\ndevice=cpu mode=normal nonsense=1\n")
    with pytest.raises(sy.InvalidArgument, match="my.tuning, line 2"):
        sy.tuned_values("cpu", "low_latency", path=path, **SHAPE)
    with pytest.raises(sy.InvalidArgument, match="mode = 'high'"):
        sy.tuned_values("cpu", "high", **SHAPE)
    with pytest.raises(sy.InvalidArgument, match="^ranks = 0"):
        sy.tuned_values("cpu", "flat", ranks=0, hidden=1, max_tokens=1)
