# SPDX-License-Identifier: Apache-2.0
"""SGLang's expert load balancing (EPLB) with Switchyard: SGLang's own manager, recorder, algorithm, movement of weights and mapping
of ids, against plain torch with logical experts."""
import os

import pytest

torch = pytest.importorskip("torch")

import switchyard as sy  # noqa: E402
from fp8_values import blocks_of  # noqa: E402
from sglang_eplb import LAYERS, dispatch_now, eplb, manager_of, map_now, routed, run, skewed, slots_of  # noqa: E402
from sglang_passes import layer_of  # noqa: E402
from sglang_ranks import EXPERTS, TOPK, deep_gemm_available, dispatcher_of, mlp, over_ranks, weights_of  # noqa: E402

BAR = 1e-2
HIDDEN = 384


def _with_layer():
    try:
        sy.MoeLayer.heap_bytes(2, hidden=64, intermediate=64, num_experts=2, topk=1, max_tokens=2)
    except sy.errors.LibraryNotFound:
        pytest.skip("no library switchyard_layer")


class _Experts:
    """A layer of SGLang's dispatcher, on Switchyard, and plain torch experts."""

    def __init__(self, rank, world, weights, physical):
        self.dispatcher = dispatcher_of(world, HIDDEN, num_experts=physical, num_local_experts=physical // world)
        here = map_now()[0][slots_of(rank, world, physical)]
        self.w13, self.w2 = (each[here].clone() for each in weights)

    def __call__(self, x, topk):
        given = self.dispatcher.dispatch(hidden_states=x, topk_output=topk)
        if hasattr(given, "masked_m"):
            out = torch.zeros(given.hidden_states.shape, dtype=torch.bfloat16)
            for expert, count in enumerate(given.masked_m.tolist()):
                rows = given.hidden_states[expert, :count]
                out[expert, :count] = mlp(rows, self.w13[expert], self.w2[expert]).bfloat16()
        else:
            rows = torch.zeros(given.hidden_states.shape, dtype=torch.float32)
            for row, k in (given.topk_ids >= 0).nonzero().tolist():
                expert = given.topk_ids[row, k]
                rows[row] += given.topk_weights[row, k] * mlp(given.hidden_states[row:row + 1], self.w13[expert], self.w2[expert])[0]
            out = rows.bfloat16()
        return self.dispatcher.combine(combine_input=(out, given.topk_ids, given.topk_weights))

    def tensors(self):
        return [self.w13, self.w2]


class _Whole:
    """SGLang's layer on a MoeLayer."""

    def __init__(self, rank, world, weights, physical, fp8, number):
        from sglang.srt.layers.quantization.fp8 import Fp8Config

        config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
        made = layer_of(world, HIDDEN, config if fp8 else None, num_experts=physical, layer_id=number)
        here = map_now()[number][slots_of(rank, world, physical)]
        with torch.no_grad():
            for name, each in zip(("w13_weight", "w2_weight"), weights):
                values = blocks_of(each) if fp8 else (each,)
                getattr(made, name).copy_(values[0][here])
                if fp8:
                    getattr(made, name + "_scale_inv").copy_(values[1][here])
        made.quant_method.process_weights_after_loading(made)
        self.layer = made

    def __call__(self, x, topk):
        return self.layer(x, topk)

    def tensors(self):
        return [each.data for each in self.layer.parameters()]


def _install(form):
    from switchyard.engines import sglang

    os.environ["SWITCHYARD_SGLANG_MAX_TOKENS"] = "24"
    sglang.install(form)


def _rearranged(rank, world, form, mode, planted=False):
    """Two layers before and after SGLang's rearrangement."""
    _install("all2all" if form == "all2all" else "layer")
    redundant = EXPERTS // 2 if world == 2 else EXPERTS
    physical, weights = EXPERTS + redundant, [weights_of(HIDDEN, seed=number) for number in range(LAYERS)]
    expected = weights
    if form == "fp8 layer":
        expected = [tuple(blocks_of(each)[2] for each in pair) for pair in weights]
    with eplb(rank, world, redundant, mode) as module, deep_gemm_available():
        layers = [_Experts(rank, world, weights[number], physical) if form == "all2all" else
                  _Whole(rank, world, weights[number], physical, form == "fp8 layer", number) for number in range(LAYERS)]
        inputs, extend, tensors = skewed(world, HIDDEN, 3), mode == "normal", [each.tensors() for each in layers]
        manager, was, before = manager_of(module, tensors), map_now(), [[each.clone() for each in of] for of in tensors]
        error = run(layers, rank, inputs, expected, extend)
        assert error < BAR, error
        for _ in manager.rebalance():
            pass
        now = map_now()
        assert all((a != b).any() and set(b.tolist()) == set(range(EXPERTS)) for a, b in zip(was, now))
        assert torch.bincount(now[0], minlength=EXPERTS)[0] > 1, now  # the counts of the busiest expert arrived
        if planted:
            _move_back(rank, world, physical, was[0], now[0], tensors[0], before[0])
        error = torch.tensor(run(layers, rank, inputs, expected, extend))
        torch.distributed.all_reduce(error, torch.distributed.ReduceOp.MAX)
        assert (error > 0.1 if planted else error < BAR), error


def _move_back(rank, world, physical, was, now, tensors, before):
    """Restores the former weights in the slots of the busiest expert (lower ids have more routes) among the moved experts that a rank
    uses."""
    used = [torch.empty(EXPERTS, dtype=torch.int64) for _ in range(world)]
    torch.distributed.all_gather(used, dispatch_now()[0].contiguous())
    moved = [slot for slot in torch.cat(used).unique().tolist() if was[slot] != now[slot]]
    expert, here = min(int(now[slot]) for slot in moved), slots_of(rank, world, physical)
    for slot in moved:
        if now[slot] == expert and here.start <= slot < here.stop:
            for each, old in zip(tensors, before):
                each[slot - here.start] = old[slot - here.start]


FORMS = [("all2all", "normal"), ("all2all", "low_latency"), ("layer", "normal"), ("fp8 layer", "normal")]


@pytest.mark.parametrize("form, mode", FORMS)
@pytest.mark.parametrize("world", [2, 4])
def test_rearrangement(world, form, mode):
    _with_layer()
    over_ranks(world, _rearranged, form, mode, ranks=world)


@pytest.mark.parametrize("form, mode", FORMS[:3])
def test_weights_that_are_not_moved_are_seen(form, mode):
    _with_layer()
    over_ranks(2, _rearranged, form, mode, True, ranks=2)


def _refused(rank, world):
    from sglang.srt.layers.moe.utils import DeepEPMode
    from sglang.srt.runtime_context import get_exec, get_flags
    from switchyard.engines import sglang

    weights = weights_of(HIDDEN)
    _install("layer")
    for mode, recorder in (("low_latency", "stat"), ("auto", "stat"), ("normal", "stat_approx")):
        with eplb(rank, world, 4, "normal"), deep_gemm_available(), \
                get_exec().moe.override(expert_distribution_recorder_mode=recorder), \
                get_flags().moe.override(deepep_mode=DeepEPMode(mode)):
            match = f"--expert-distribution-recorder-mode {recorder} with --deepep-mode {mode} .--enable-eplb.: the layer does not"
            with pytest.raises(sy.InvalidArgument, match=match):
                _Whole(rank, world, weights, EXPERTS + 4, False, 0)
    for form in ("layer", "all2all"):
        sglang.uninstall()
        _install(form)
        with eplb(rank, world, 4, "normal"), deep_gemm_available(), get_exec().moe.override(elastic_ep_backend="mooncake"), \
                pytest.raises(sy.InvalidArgument, match="--elastic-ep-backend mooncake: the number of physical experts may change"):
            _Experts(rank, world, weights, EXPERTS + 4) if form == "all2all" else _Whole(rank, world, weights, EXPERTS + 4, False, 0)


def test_refused():
    _with_layer()
    over_ranks(2, _refused, ranks=2)


def _files(rank, world, folder):
    """SGLang starts with placements that Switchyard wrote, and Switchyard reads files that SGLang's recorder wrote."""
    from sglang.srt.environ import envs
    from sglang.srt.eplb.expert_distribution import ExpertDistributionRecorder, set_global_expert_distribution_recorder
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.runtime_context import get_exec
    from switchyard.engines import expert_location

    counts = torch.randint(1, 100, (LAYERS, EXPERTS), generator=torch.Generator().manual_seed(5)).numpy()
    counts[:, 2] = 400
    slots = (EXPERTS + 4) // world
    maps = [sy.ExpertMap.home(num_experts=EXPERTS, world=world, slots_per_rank=slots).plan(each) for each in counts]
    envs.SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR.set(str(folder / f"rank{rank}"))

    def chosen_by(rank):
        return torch.randint(EXPERTS, (9, TOPK), generator=torch.Generator().manual_seed(rank), dtype=torch.int32)

    given = [slice(number * TOPK, (number + 1) * TOPK) for number in range(3)]
    for number, placement in enumerate((expert_location.place(counts, world=world, slots_per_rank=slots),
                                        expert_location.from_expert_maps(maps, counts))):
        path = str(folder / f"{rank}.{number}") + (".json" if number else ".pt")
        expert_location.save(path, placement)
        for mode in ("stat", "per_pass"):
            with eplb(rank, world, 4, "normal", path, enable=False), get_exec().moe.override(expert_distribution_recorder_mode=mode):
                now = map_now()
                assert (now.numpy() == placement).all() and (expert_location.load(path) == placement).all()
                back = expert_location.to_expert_maps(now, world=world, num_experts=EXPERTS)
                assert [each.expert_of_slot.tolist() for each in back] == now.tolist()
                recorder = ExpertDistributionRecorder.init_new(get_global_expert_location_metadata(), rank)
                set_global_expert_distribution_recorder(recorder)
                recorder.start_record()
                ids = chosen_by(rank)
                for number_of_pass, rows in enumerate(given):
                    with recorder.with_forward_pass(number_of_pass, None):
                        for layer in range(LAYERS):
                            with recorder.with_current_layer(layer):
                                routed(layer, ids[rows] // (layer + 1), torch.ones(TOPK, TOPK))
                recorder.dump_record("file")
                torch.distributed.barrier()
                written = sorted(folder.glob("rank*/*.pt"))
                assert len(written) == (1 if mode == "stat" else world)
                every = torch.cat([chosen_by(each) for each in range(world)]).flatten().long()
                right = [torch.bincount(every // (layer + 1), minlength=EXPERTS).tolist() for layer in range(LAYERS)]
                assert expert_location.load_counts(*written).tolist() == right
                torch.distributed.barrier()
                for each in (folder / f"rank{rank}").glob("*.pt"):
                    each.unlink()
                torch.distributed.barrier()


def test_files(tmp_path):
    over_ranks(2, _files, tmp_path, ranks=2)
