"""Stock megatron-core: its GPTModel, 1F1B or (v > 1) interleaved schedule, DDP buffer and Adam, from its public API.

Keys of a case: v; recompute: none, full, `block:K` (full, of K layers a stage), `selective:MODULES`; offload: modules
of its fine-grained activation offload.

Written against 0.19.2 (Python 3.12, needs triton to import) and run on CPUs against 0.16.1. What a version does not
know is left out where it is a matter of speed and refused by name where a case asks for it. Layers come from the local
spec, as Transformer Engine is not needed; its core attention, which would hold all scores, is replaced in the spec by
SDPA. So norms are torch's, and Adam torch's unfused one, as in any megatron-core without Transformer Engine and Apex.

Not on a CPU: its schedules and optimizer make tensors on "cuda" by name. The tests redirect those.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.jobs import Case
from benchmarks.peers.measure import measure
from benchmarks.peers.plain import attend, attend_expanded
from benchmarks.peers.torch_pipeline import kernel, takes_grouped_heads
from slimpipe.config import Config, ModelConfig
from slimpipe.models.contract import initialise
from slimpipe.parallel.mesh import Processes
from slimpipe.runtime.stage import generator
from slimpipe.train.dtypes import DTYPES

Loss = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]


class CoreAttention(nn.Module):
    """SDPA in megatron-core's shapes: q [s, b, h, d], k and v [s, b, g, d] -> [s, b, h d]."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        device = torch.device("cpu" if config.use_cpu_initialization else "cuda")
        self.attend = attend if takes_grouped_heads(device) else attend_expanded

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        out = self.attend(*(t.permute(1, 2, 0, 3) for t in (query, key, value)))
        return out.permute(2, 0, 1, 3).flatten(2)


def accepted(make: Callable[..., Any], asked: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings that `make` takes. Raises ValueError, naming them, where it lacks some that are not optional."""
    known = inspect.signature(make).parameters
    lacking = [key for key in asked if key not in known and key not in optional]
    if lacking:
        raise ValueError(f"this megatron-core's {make.__name__} has no {', '.join(lacking)}")
    return {key: value for key, value in asked.items() if key in known}


def recomputation(mode: str) -> dict[str, Any]:
    """TransformerConfig's settings for a case's `recompute`."""
    kind, _, detail = mode.partition(":")
    if kind == "none":
        return {}
    if kind == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if kind == "block":
        return {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": int(detail)}
    if kind == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": detail.split(",")}
    raise ValueError(f"recompute = {mode}: of megatron-core there are none, full, block:K, selective:MODULES")


def transformer_config(config: Config, case: Case, cpu: bool) -> Any:
    from megatron.core.transformer import TransformerConfig

    model, dtype, v = config.model, DTYPES[config.train.dtype], case.get("v", 1)
    asked: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.intermediate_size,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "pipeline_model_parallel_size": config.parallel.pp,
        "virtual_pipeline_model_parallel_size": v if v > 1 else None,
        "overlap_p2p_comm": v > 1,
        "batch_p2p_comm": v == 1,
        "use_cpu_initialization": cpu,
        **recomputation(case.get("recompute", "none")),
    }
    if case.get("offload"):
        asked |= {"fine_grained_activation_offloading": True, "offload_modules": case["offload"].split(",")}
    faster = {
        "deallocate_pipeline_outputs": True,
        "perform_initialization": False,
        "bias_activation_fusion": not cpu,
        "bias_dropout_fusion": not cpu,
        "cross_entropy_loss_fusion": not cpu,
        "gradient_accumulation_fusion": False,  # an extension of Apex
    }
    return TransformerConfig(**accepted(TransformerConfig, asked | faster, tuple(faster)))


def their_weights(model: ModelConfig, names: dict[str, Tensor], layers: list[int]) -> Iterator[tuple[str, Tensor]]:
    """(slimpipe's name, their tensor) of a chunk; `layers`: the places in the whole model of its layers."""
    parts = {
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attention.linear_qkv",
        "attention.output": "self_attention.linear_proj",
        "mlp_norm": "pre_mlp_layernorm",
        "mlp.gate_up": "mlp.linear_fc1",
        "mlp.down": "mlp.linear_fc2",
    }
    ends = {
        "embedding.word_embeddings.weight": "embedding.weight",
        "decoder.final_layernorm.weight": "head.norm.weight",
        "output_layer.weight": "head.weight",
    }
    known = dict(ends)
    for local, layer in enumerate(layers):
        for ours, theirs in parts.items():
            known[f"decoder.layers.{local}.{theirs}.weight"] = f"layers.{layer}.{ours}.weight"
    for name, tensor in names.items():
        if name not in known:
            raise ValueError(f"megatron-core's parameter {name} {list(tensor.shape)} is none of this model's")
        yield known[name], tensor


def interleave_qkv(weight: Tensor, model: ModelConfig) -> Tensor:
    """All queries, keys, values in turn -> group by group: a group's queries, its key, its value. [(h + 2 g) d, H]"""
    d, g = model.head_dim, model.kv_heads
    q, k, v = weight.split([model.heads * d, g * d, g * d])
    return torch.cat([t.unflatten(0, (g, -1)) for t in (q, k, v)], dim=1).flatten(0, 1)


class Megatron:
    def __init__(self, config: Config, case: Case, processes: Processes) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.distributed import finalize_model_grads as finalize
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.config, self.processes, cpu = config, processes, processes.device.type == "cpu"
        p, v, optim = processes.world, case.get("v", 1), config.optim
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=p, virtual_pipeline_model_parallel_size=v if v > 1 else None
        )
        if not cpu:
            from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(0)
        settings = transformer_config(config, case, cpu)
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        self.chunks = []
        for chunk in range(v):
            model = self._chunk(settings, chunk, chunk * p + processes.rank, p * v, case["length"])
            self.chunks.append(DistributedDataParallel(settings, buffers, model))
        asked = OptimizerConfig(
            optimizer="adam",
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            adam_beta1=optim.beta1,
            adam_beta2=optim.beta2,
            adam_eps=optim.eps,
            clip_grad=optim.grad_clip or 0.0,
            bf16=settings.bf16,
            params_dtype=settings.params_dtype,
        )
        self.optimizer = get_megatron_optimizer(asked, self.chunks)
        settings.grad_scale_func = self.optimizer.scale_loss
        settings.finalize_model_grads_func = finalize
        # Each chunk's gradients are summed over its data-parallel ranks (one) when the step's backwards are done.
        no_sync = [model.no_sync for model in self.chunks]
        settings.no_sync_func = no_sync if v > 1 else no_sync[0]
        self.run_schedule = get_forward_backward_func()
        self.notes: dict[str, Any] = {"megatron": _version()}

    def _chunk(self, settings: Any, chunk: int, stage: int, stages: int, length: int) -> nn.Module:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel

        model, device = self.config.model, self.processes.device
        spec = get_gpt_layer_local_spec(**accepted(get_gpt_layer_local_spec, {"normalization": "RMSNorm"}))
        spec.submodules.self_attention.submodules.core_attention = CoreAttention
        asked = {
            "config": settings,
            "transformer_layer_spec": spec,
            "vocab_size": model.vocab_size,
            "max_sequence_length": length,
            "pre_process": stage == 0,
            "post_process": stage == stages - 1,
            "share_embeddings_and_output_weights": False,
            "position_embedding_type": "rope",
            "rotary_base": int(model.rope_theta),
            "vp_stage": chunk if stages > self.processes.world else None,
        }
        found = GPTModel(**accepted(GPTModel, asked)).to(device)
        if settings.bf16:
            found.bfloat16()
        places = [layer.layer_number - 1 for layer in found.decoder.layers]
        with torch.no_grad():
            for name, tensor in their_weights(model, dict(found.named_parameters()), places):
                value = torch.empty_like(tensor)
                initialise(found, name, value, model.init_std, generator(self.config.train.seed, name, device))
                tensor.copy_(interleave_qkv(value, model) if name.endswith("qkv.weight") else value)
        return found

    def step(self, tokens: Tensor, labels: Tensor, rate: float) -> tuple[float, float]:
        m, length = tokens.shape
        positions = torch.arange(length, device=tokens.device)[None]

        def forward(data: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> tuple[Tensor, Loss]:
            text, targets = next(data)
            return model(text, positions, None, labels=targets), _mean

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        rows = list(zip(tokens[:, None], labels[:, None], strict=True))
        with kernel(self.processes.device):
            found = self.run_schedule(
                forward_step_func=forward,
                data_iterator=[iter(rows) for _ in self.chunks] if len(self.chunks) > 1 else iter(rows),
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=m,
                seq_length=length,
                micro_batch_size=1,
                forward_only=False,
            )
        # What its own scheduler of rates does each step.
        for group in self.optimizer.param_groups:
            group["lr"] = rate
            group["weight_decay"] = self.config.optim.weight_decay * group.get("wd_mult", 1.0)
        _, norm, _ = self.optimizer.step()
        # The last rank alone has losses.
        losses = [one["loss"] for one in found]
        loss = torch.stack(losses).sum() / m if losses else torch.zeros((), device=self.processes.device)
        dist.all_reduce(loss)
        return float(loss), float(norm)

    def close(self) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """losses [b, s] of one microbatch; the schedule divides by their number."""
    mean = losses.float().mean()
    # The schedule divides in place.
    return mean, {"loss": mean.detach().clone()}


def _version() -> str:
    import megatron.core

    return str(getattr(megatron.core, "__version__", "unknown"))


def run(config: Config, case: Case, processes: Processes) -> dict[str, Any] | None:
    return measure(config, case, processes, Megatron)
