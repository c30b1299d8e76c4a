# SPDX-License-Identifier: Apache-2.0
"""The parts `layer` and `host` of engine_exchange.py."""
from rank_processes import RANKS

LOW_LATENCY = "deepep_low_latency"


def nothing(*given, **more):
    """Replaces a method."""


class Layers:
    """Whole layers through vLLM, and host times. A base of engine_exchange.Bench, which has the other attributes."""

    # ---- Whole layers ----

    def weights_of(self, dtype, shape):
        """Returns a layer's weights on this rank, small random values, and their scales (bf16: None)."""
        torch, (hidden, intermediate, experts, _) = self.torch, shape
        made, scales, here = [], [], experts // RANKS
        for rows, columns in ((2 * intermediate, hidden), (hidden, intermediate)):
            bf16 = torch.randn((1, rows, columns), device=self.device).mul_(columns**-0.5).bfloat16().repeat(here, 1, 1)
            made.append(bf16 if dtype == "bf16" else (bf16 * 64).to(torch.float8_e4m3fn))
            size = (here, rows // 128, columns // 128)
            scales.append(None if dtype == "bf16" else torch.full(size, 1 / 64, device=self.device))
        return made, scales

    def runner(self, config, dtype, shape, routing):
        """Returns vLLM's runner of a layer with random weights, and the weights and scales that it reads."""
        from vllm.model_executor.layers.quantization.fp8 import Fp8Config

        fp8 = dtype == "fp8"
        block = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
        made = self.vllm.layers_of(config, shape, routing, {}, quant_config=block if fp8 else None, count=1,
                                   prefix=f"{dtype}.layers")[0]
        its = made.routed_experts
        (w13, w2), scales = self.weights_of(dtype, shape)
        its.w13_weight.data.copy_(w13)
        its.w2_weight.data.copy_(w2)
        if fp8:
            its.w13_weight_scale_inv.data.copy_(scales[0])
            its.w2_weight_scale_inv.data.copy_(scales[1])
        del w13, w2
        its.quant_method.process_weights_after_loading(its)
        return made, (its.w13_weight.data, its.w2_weight.data), scales

    def direct(self, weights, scales, dtype, shape, tokens, **options):
        """Returns a MoeLayer that reads the same weights, and its group."""
        import switchyard as sy

        hidden, intermediate, experts, topk = shape
        config = dict(hidden=hidden, intermediate=intermediate, num_experts=experts, topk=topk, max_tokens=tokens, storage="view",
                      dtype="fp8_e4m3" if dtype == "fp8" else "bf16", **options)
        group = sy.Group.from_process_group(self.dist.group.WORLD, sy.MoeLayer.heap_bytes(RANKS, backend="cuda", **config), backend="cuda",
                                            device=self.device.index, timeout=30, rendezvous_timeout=60)
        return sy.MoeLayer(group, *weights, w13_scales=scales[0], w2_scales=scales[1], **config), group

    def passes(self, config, tokens):
        """Returns vLLM's context of a forward pass."""
        from vllm.forward_context import set_forward_context

        return set_forward_context(None, config, num_tokens=tokens, num_tokens_across_dp=self.torch.tensor((tokens,) * RANKS))

    def layer(self, store):
        """A whole layer through vLLM's extension point, and called directly."""
        from switchyard.engines import vllm as plugin

        given = self.given
        shape, tokens = (given.hidden, given.intermediate, given.layer_experts, given.topk), given.tokens
        plugin.install("layer")
        with self.configured(store, "allgather_reducescatter", tokens) as config:
            config.kernel_config.set_platform_defaults(config)
            for dtype in ("bf16", "fp8"):
                with self.attempt("layer", dtype):
                    self.layer_of(config, dtype, shape, tokens)
                self.torch.cuda.empty_cache()

    def layer_of(self, config, dtype, shape, tokens):
        x, ids, weights = self.inputs(tokens, shape[2])
        ids, out, kept = ids.int(), self.torch.empty_like(x), x.clone()  # vLLM may write results to x
        runner, matrices, scales = self.runner(config, dtype, shape, (weights, ids))
        logits = self.torch.zeros((tokens, shape[2]), device=self.device)
        with self.passes(config, tokens):
            through = runner(x.clone(), logits).clone()
            made = runner.routed_experts.quant_method.moe_kernel.fused_experts._layer
            ours = self.figure("layer", f"{dtype}, through vLLM", self.times.of(lambda: runner(x, logits)), tokens=tokens,
                               implementation=made.implementation)
        same = self.figure("layer", f"{dtype}, same layer called directly", self.times.of(lambda: made.forward(kept, ids, weights, out=out)))
        separate, group = self.direct(matrices, scales, dtype, shape, tokens, form="separate", order="per_rank")
        separate.forward(kept, ids, weights, out=out)
        self.check(through, out.float())
        best = self.figure("layer", f"{dtype}, separate, per_rank", self.times.of(lambda: separate.forward(kept, ids, weights, out=out)),
                           implementation=separate.implementation)
        self.compared("layer", f"{dtype}, through vLLM / separate", ours, best, 0.95)
        self.compared("layer", f"{dtype}, through vLLM / same layer", ours, same, None)
        self.dist.barrier()
        group.close()

    # ---- Host times ----

    def host(self, store):
        """Host time of decode steps through vLLM and of the calls that they make."""
        from switchyard.engines import vllm as plugin

        with self.configured(store, LOW_LATENCY, self.given.decode_tokens, self.given.decode_tokens) as config:
            with self.attempt("host", "exchange"):
                plugin.install("all2all")
                self.vllm.manager_of(LOW_LATENCY)
                self.host_of_exchange(config)
            with self.attempt("host", "layer"):
                plugin.uninstall()
                plugin.install("layer")
                config.parallel_config.all2all_backend = "allgather_reducescatter"
                config.kernel_config.set_platform_defaults(config)
                self.host_of_layer(config)

    def host_of_exchange(self, config):
        made, call, (x, ids, weights) = self.kernel(config, LOW_LATENCY, self.given.decode_tokens, False)
        exchange, received, out = made._exchange, made._received, self.torch.empty_like(x)
        y = self.torch.empty_like(received.x)

        def dispatch(*given, **more):
            exchange.dispatch(x, ids, weights, output=received)
            return prepared

        def combine(*given, **more):
            exchange.combine(y, received, order="per_rank", out=out)

        def pair():
            dispatch()
            combine()

        def prepare(*given, **more):
            return prepared

        call()
        prepared = made.prepare(x, weights, ids, self.given.experts, None, False, self.vllm.quant_config_of({}))
        combine()
        self.host_figures("exchange", call, {(made, "prepare"): (prepare, dispatch), (made, "finalize"): (nothing, combine)}, pair)

    def host_of_layer(self, config):
        given, tokens = self.given, self.given.decode_tokens
        x, ids, weights = self.inputs(tokens, given.experts)
        ids = ids.int()
        runner, _, _ = self.runner(config, "bf16", (given.hidden, 256, given.experts, given.topk), (weights, ids))
        logits, out = self.torch.zeros((tokens, given.experts), device=self.device), self.torch.empty_like(x)

        def forward(*given, **more):
            experts._layer.forward(x, ids, weights, out=out)

        with self.passes(config, tokens):
            runner(x, logits)
            kernel = runner.routed_experts.quant_method.moe_kernel
            made, experts = kernel.prepare_finalize, kernel.fused_experts
            finalize = super(type(made), made).finalize
            self.host_figures("layer", lambda: runner(x, logits),
                              {(experts, "apply"): (nothing, forward), (made, "finalize"): (finalize, finalize)}, forward)

    def host_figures(self, name, through, methods, bare):
        """Records host times. methods: the plug-in's methods that vLLM calls in `through`, as (object, name), with their
        replacements in "vLLM alone" and in "direct calls in vLLM". bare: the library calls of the plug-in."""

        def step(number):
            def call():
                through()

            def before():
                for (owner, method), others in methods.items():
                    vars(owner).pop(method, None)
                    if number is not None:
                        setattr(owner, method, others[number])

            call.before = before
            return call

        calls = {"through vLLM": step(None), "vLLM alone": step(0), "direct calls in vLLM": step(1), "called directly": bare}
        for call in (through, bare):
            call()
        times = self.host_times(calls)
        calls["through vLLM"].before()
        for each, taken in times.items():
            self.figure("host", f"{name}, {each}", self.typical(taken))
        for added, bar, of in (("vLLM and the plug-in", None, lambda whole, alone, inside, direct: whole - direct),
                               ("the plug-in, and calls in vLLM", 25, lambda whole, alone, inside, direct: whole - alone - direct),
                               ("the plug-in", 25, lambda whole, alone, inside, direct: whole - inside),
                               ("calls in vLLM", None, lambda whole, alone, inside, direct: inside - alone - direct)):
            time = self.typical([of(*each) for each in zip(*times.values())])
            self.send("difference", "host", f"{name}, added by {added}", us=round(time, 2), bar=bar)
