"""Tensors that are not activations: parameters, buffers, and whatever else outlives a step.

Moving one would free nothing. They are known by their storage, since autograd saves views of them (`nn.Linear` saves
`weight.t()`, a plain tensor): parameters by class, their views by the tensor that they are views of, buffers by the
modules that are called, everything else (tables, data) by having outlived a step.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_pre_hook


class Excluded:
    def __init__(self) -> None:
        # A weak reference keeps the storage's address from being given to another: a key is good as long as it is here.
        self._storages: dict[int, StorageWeakRef] = {}
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hook: Any = None

    def __len__(self) -> int:
        return len(self._storages)

    def add(self, tensor: Tensor) -> None:
        if tensor.layout == torch.strided and type(tensor) in (Tensor, nn.Parameter):
            self.add_storage(tensor.untyped_storage())

    def add_storage(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def add_reference(self, reference: StorageWeakRef) -> None:
        self._storages.setdefault(reference.cdata, reference)

    def add_module(self, module: nn.Module, recurse: bool = True) -> None:
        for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
            self.add(tensor)

    def holds(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether the tensor, a strided one in `storage`, is to stay where it is."""
        if storage._cdata in self._storages:
            return True
        base = tensor._base
        for candidate in (tensor, base):
            if isinstance(candidate, nn.Parameter):
                self.add_storage(storage)
                return True
        # A leaf of the caller's that wants a gradient: held by the caller, until that gradient is read at least.
        return (tensor.requires_grad and tensor.is_leaf) or (base is not None and base.requires_grad and base.is_leaf)

    def watch_modules(self, on: bool) -> None:
        """While on, the parameters and buffers of every module that is called are noted, at the module's first call."""
        if on and self._hook is None:
            self._hook = register_module_forward_pre_hook(self._called)
        elif not on and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def forget_dead(self) -> None:
        for cdata in [cdata for cdata, reference in self._storages.items() if reference.expired()]:
            del self._storages[cdata]

    def _called(self, module: nn.Module, arguments: Any) -> None:
        if module not in self._modules:
            self._modules.add(module)
            self.add_module(module, recurse=False)
