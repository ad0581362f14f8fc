"""The flash-attn packages, versions 2, 3 and 4, called by the names of their arguments.

Their functions differ from version to version, and between releases of one. What the contract needs has had the same
names throughout: so each function is asked for its signature once, is given what it takes of that, and what else it
insists on (dropout, windows, ALiBi) with the value that turns it off. A function that insists on something unknown is
refused by name before anything runs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor


@dataclass(frozen=True)
class Package:
    """Where one version lies: its modules, the first that is there counts, and its distribution."""

    modules: tuple[str, ...]
    distribution: str
    remedy: str


PACKAGES: Final[Mapping[str, Package]] = MappingProxyType(
    {
        "flash2": Package(("flash_attn.flash_attn_interface",), "flash-attn", "pip install flash-attn"),
        "flash3": Package(
            ("flash_attn_3.flash_attn_interface", "flash_attn_interface"),
            "flash-attn-3",
            "build the folder hopper of the flash-attention repository",
        ),
        "flash4": Package(("flash_attn.cute.interface",), "flash-attn-4", "pip install 'slimpipe[flash]'"),
    }
)
_FORWARD: Final = ("_flash_attn_fwd", "_flash_attn_forward")
_BACKWARD: Final = ("_flash_attn_bwd", "_flash_attn_backward")
_OFF: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "dropout_p": 0.0,
        "window_size": (-1, -1),
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
        "return_softmax": False,
        "deterministic": False,
        "rng_state": None,
    }
)
"""Given where a function insists on it."""
_QUERY, _GRADIENT = ("q", "k", "v"), ("dout", "out", "dq", "dk", "dv")


class PackagedFlashAttention:
    """bf16 or fp16 on GPUs; grouped-query heads unexpanded; strided keys and values. The mask of a causal block lies at
    its bottom right, so a slice and the past in front of it can be one block."""

    bottom_right = True

    def __init__(self, name: str, module: Any) -> None:
        self.name = name
        here = f"train.attention = {name}: {module.__name__}"
        known = ("softmax_scale", "causal", "is_causal", "return_lse", "lse", "softmax_lse")
        self._forward = _bind(here, module, _FORWARD, (*_QUERY, *known[:4]))
        self._backward = _bind(here, module, _BACKWARD, (*_QUERY, *_GRADIENT, *known[:3], *known[4:]))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        found = self._forward(
            {"q": q, "k": k, "v": v, "softmax_scale": q.shape[-1] ** -0.5, "return_lse": True} | _mask(causal)
        )
        shape = (q.shape[0], q.shape[2], q.shape[1])
        # Old releases of version 2 return their inputs between output and LSE.
        for other in found[1:]:
            if isinstance(other, Tensor) and other.shape == shape and other.dtype == torch.float32:
                return found[0], other
        raise RuntimeError(f"train.attention = {self.name}: its forward gives no LSE {list(shape)} in fp32")

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse, dout, out = lse.contiguous(), dout.contiguous(), out.contiguous()
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        given = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse, "softmax_lse": lse}
        gradients = {"dq": dq, "dk": dk, "dv": dv, "softmax_scale": q.shape[-1] ** -0.5}
        self._backward(given | gradients | _mask(causal))
        return dq, dk, dv


def _mask(causal: bool) -> dict[str, bool]:
    return {"causal": causal, "is_causal": causal}


def _bind(here: str, module: Any, names: tuple[str, ...], offered: tuple[str, ...]) -> Callable[[dict[str, Any]], Any]:
    """The first of the module's functions that is there, as one that takes all that is offered and passes on what the
    function has a parameter for. Raises ValueError, naming `train.attention`, where it insists on anything else."""
    function = next((getattr(module, name) for name in names if hasattr(module, name)), None)
    if function is None:
        raise ValueError(f"{here} has none of {', '.join(names)}; use another version, or train.attention: auto")
    # torch.library's custom operators hide the signature of what they wrap.
    parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
    insists = {name for name, parameter in parameters.items() if parameter.default is inspect.Parameter.empty}
    unknown = sorted(insists - set(offered) - _OFF.keys())
    if unknown or not {*_QUERY} <= parameters.keys():
        what = f"needs {', '.join(unknown)}" if unknown else "does not take q, k and v"
        raise ValueError(
            f"{here}.{getattr(function, '__name__', names[0])} {what}, which slimpipe does not know; use another "
            "version, or train.attention: auto"
        )
    off = {name: _OFF[name] for name in insists - set(offered)}
    taken = [name for name in offered if name in parameters]

    def call(values: dict[str, Any]) -> Any:
        return function(**{name: values[name] for name in taken}, **off)

    return call


def load_package(name: str) -> PackagedFlashAttention:
    """`flash2`, `flash3` or `flash4`. Raises ValueError, naming `train.attention`, where it is not there or unfit."""
    package = PACKAGES[name]
    reasons = []
    for module in package.modules:
        try:
            return PackagedFlashAttention(name, importlib.import_module(module))
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            reasons.append(str(error).splitlines()[0] if str(error) else type(error).__name__)
    raise ValueError(f"train.attention = {name}: {'; '.join(reasons)}; {package.remedy}, or use auto")


def is_installed(name: str) -> bool:
    """Whether a package is there. Whether it works is known when it is loaded: that can take seconds."""
    for module in PACKAGES[name].modules:
        # Of a.b.c only a is imported: b may compile kernels when it is.
        top = ".".join(module.split(".")[:2])
        try:
            if importlib.util.find_spec(top) is not None:
                return True
        except ImportError:
            continue
    return False


def version_of(name: str) -> str:
    """The release of a package, `unknown` where it does not say."""
    try:
        return importlib.metadata.version(PACKAGES[name].distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
