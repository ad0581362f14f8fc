"""Training programs that use autograd in all the ways that trip swap tools up.

Each takes `step`, a context manager for one step, and returns all losses and gradients. Seeds are set inside, so two
runs compute the same. They run on torch's default device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.swap.support import STEPS, Program, Step

PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def noise(*shape: int, seed: int = 0, **options: Any) -> Tensor:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", **options)
    return drawn.to(torch.get_default_device())


def integers(high: int, *shape: int, seed: int) -> Tensor:
    drawn = torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device())


def gradients(module: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def train(
    step: Step,
    module: nn.Module,
    loss_of: Callable[[nn.Module, int], Tensor],
    steps: int = STEPS,
) -> list[Tensor]:
    """Plain training with AdamW: the loss and the gradients of every step, the weights at the end."""
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-3)
    found = []
    for i in range(steps):
        with step():
            loss = loss_of(module, i)
            loss.backward()
            found += [loss.detach().clone(), *gradients(module)]
            optimizer.step()
            optimizer.zero_grad()
    return found + [p.detach().clone() for p in module.parameters()]


def mlp(width: int = 32, layers: int = 4, **options: Any) -> nn.Sequential:
    def layer() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return nn.Sequential(*(layer() for _ in range(layers)))


def batch(i: int, rows: int = 16, width: int = 32) -> Tensor:
    return noise(rows, width, seed=1000 + i)


def square(module: nn.Module, i: int) -> Tensor:
    return module(batch(i)).square().mean()


@program
def plain(step: Step) -> list[Tensor]:
    return train(step, mlp(), square)


class Attention(nn.Module):
    """Views of one projection, transposes, a residual, dropout."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = (
            part.view(b, s, self.heads, w // self.heads).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        weights = (q @ k.transpose(-1, -2) / math.sqrt(w // self.heads)).softmax(-1)
        mixed = F.dropout(weights, 0.1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(b, s, w))


@program
def views_and_transposes(step: Step) -> list[Tensor]:
    model = nn.Sequential(Attention(), Attention(), Attention())
    return train(step, model, lambda m, i: m(noise(2, 16, 32, seed=i)).square().mean())


@program
def fused_attention(step: Step) -> list[Tensor]:
    class Sdpa(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + mixed.transpose(1, 2).reshape(2, 16, 32)

    return train(step, nn.Sequential(Sdpa(), Sdpa()), lambda m, i: m(noise(2, 16, 32, seed=i)).square().mean())


@program
def saved_more_than_once(step: Step) -> list[Tensor]:
    def loss(m: nn.Module, i: int) -> Tensor:
        y = m(batch(i, 32))
        s = y.t() @ y  # square: its transpose has the same address and shape
        return (s @ s.t() * s + s.t() * s.exp().clamp(max=3) + s * s).mean() + (y * y).sum() * (y * y).mean()

    return train(step, mlp(), loss)


@program
def expanded_and_scalars(step: Step) -> list[Tensor]:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = mlp(), nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            wide = y[:, None, :].expand(-1, 8, -1)
            column = y[:1].expand(64, -1)
            empty = y[:0] * self.scale
            return (wide * wide.sin() * self.scale).mean() + (column * column.cos()).sum() * 0.1 + empty.sum()

    return train(step, Odd(), lambda m, i: m(batch(i)))


@program
def small_views_of_large_storages(step: Step) -> list[Tensor]:
    def loss(m: nn.Module, i: int) -> Tensor:
        y = m(batch(i, 64))
        parts = [y[4 * j : 4 * j + 4] for j in range(8)]
        rows = sum(part * part.sin() for part in parts)
        columns = y[:, 3] * y[:, 5].exp().clamp(max=4)
        odd = y.flatten()[7:777:3]
        return rows.mean() + columns.mean() + (odd * odd.tanh()).sum() * 0.01

    return train(step, mlp(), loss)


@program
def other_views(step: Step) -> list[Tensor]:
    """Complex and conjugated, as_strided with overlaps, other dtypes of the same bytes, flips."""

    def loss(m: nn.Module, i: int) -> Tensor:
        y = m(batch(i, 32))
        z = torch.view_as_complex(y.view(32, 16, 2))
        spectrum = torch.fft.fft(z) * z.conj()
        windows = y.flatten().as_strided((60, 64), (16, 1))
        bits = y.detach().view(torch.int32) & 1
        return spectrum.abs().mean() + (windows * windows.sigmoid()).mean() + (y.flip(0) * y * bits).mean()

    return train(step, mlp(), loss)


@program
def tied_and_frozen(step: Step) -> list[Tensor]:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.body, self.frozen = nn.Embedding(64, 32), mlp(layers=2), nn.Linear(32, 32)
            self.frozen.requires_grad_(False)
            self.register_buffer("table", noise(32, 32, seed=5))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.frozen(self.body(self.words(tokens)) @ self.table)
            return F.cross_entropy(F.linear(x, self.words.weight), tokens.roll(1))

    tokens = integers(64, 64, seed=3)
    return train(step, Tied(), lambda m, i: m(tokens.roll(i)))


@program
def low_rank_adapters(step: Step) -> list[Tensor]:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)
            self.base.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return F.gelu(self.base(x) + self.b(self.a(x)))

    return train(step, nn.Sequential(*(Adapted() for _ in range(4))), square)


@program
def checkpointing(step: Step) -> list[Tensor]:
    """Both kinds, nested, with keyword arguments and dropout."""

    def block(m: nn.Module, x: Tensor, *, scale: float = 1.0, extra: Tensor | None = None) -> Tensor:
        y = x + F.dropout(m(x), 0.2) * scale
        return y if extra is None else y * extra

    def loss(m: nn.Module, i: int) -> Tensor:
        a, b, c, d = m.children()
        x = batch(i)
        x = checkpoint(block, a, x, use_reentrant=False, scale=0.5, extra=x.cos())
        x = checkpoint(block, b, x, use_reentrant=True)
        x = checkpoint(
            lambda x: checkpoint(block, c, x.sin(), use_reentrant=False, scale=2.0) * x, x, use_reentrant=False
        )
        return block(d, x).square().mean()

    return train(step, mlp(), loss)


@program
def selective_checkpointing(step: Step) -> list[Tensor]:
    contexts = lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])  # noqa: E731

    def loss(m: nn.Module, i: int) -> Tensor:
        x = batch(i)
        for layer in m.children():
            x = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        return x.square().mean()

    return train(step, mlp(), loss)


@program
def several_forwards_then_backwards(step: Step) -> list[Tensor]:
    """In the order of the forwards, in reverse, and mixed."""
    model, found = mlp(), []
    for i in range(STEPS):
        with step():
            losses = [model(batch(10 * i + j)).square().mean() for j in range(3)]
            for j in ((0, 1, 2), (2, 1, 0), (1, 2, 0))[i % 3]:
                losses[j].backward()
            found += [*(loss.detach().clone() for loss in losses), *gradients(model)]
            model.zero_grad()
    return found


@program
def gradient_accumulation(step: Step) -> list[Tensor]:
    """In one step, and over steps."""
    model, found = mlp(), []
    for i in range(STEPS):
        with step():
            for j in range(3):
                model(batch(10 * i + j)).square().mean().backward()
    found += gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(2 * STEPS):
        with step():
            loss = model(batch(i)).square().mean()
            loss.backward()
            found.append(loss.detach().clone())
            if i % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
    return found + [p.detach().clone() for p in model.parameters()]


@program
def retained_graph(step: Step) -> list[Tensor]:
    model = mlp()
    found: list[Tensor] = []
    for i in range(STEPS):
        with step():
            y = model(batch(i))
            y.square().mean().backward(retain_graph=True)
            y.sin().sum().backward(retain_graph=True)
            found += torch.autograd.grad(y.mean(), list(model.parameters()), retain_graph=True)
            y.mean().backward()
            found += gradients(model)
            model.zero_grad()
    return found


@program
def gradient_of_gradient(step: Step) -> list[Tensor]:
    def loss(m: nn.Module, i: int) -> Tensor:
        x = batch(i).requires_grad_()
        y = m(x).square().mean()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return y + 10 * g.square().sum()

    return train(step, mlp(), loss)


@program
def backward_never_run(step: Step) -> list[Tensor]:
    """Graphs dropped, and graphs kept over several steps."""
    model, found, kept = mlp(), [], []
    for i in range(STEPS):
        with step():
            y = model(batch(i))
            if i % 3 == 1:
                kept.append(y)
            if i % 3 != 2:
                model(batch(i + 50)).square().mean().backward()
            found += [y.detach().clone(), *gradients(model)]
    kept[0].sum().backward()
    return found + gradients(model)


@program
def backward_after_the_step(step: Step) -> list[Tensor]:
    model, found = mlp(), []
    for i in range(STEPS):
        with step():
            early, late = model(batch(i)).square().mean(), model(batch(i + 50)).square().mean()
            early.backward()
        late.backward()
        found += [early.detach().clone(), late.detach().clone(), *gradients(model)]
    return found


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        raise ValueError("backward failed on purpose")


@program
def exceptions(step: Step) -> list[Tensor]:
    """In the forward, in the middle of the backward, and between them."""
    model, found = mlp(), []
    for i in range(2 * STEPS):
        with contextlib.suppress(ValueError), step():
            y = batch(i)
            for j, layer in enumerate(model.children()):
                y = layer(y)
                if i % 6 == 1 and j == 2:
                    raise ValueError("forward failed on purpose")
                if i % 6 == 3 and j == 1:
                    y = Failing.apply(y)
            if i % 6 == 5:
                raise ValueError("no backward")
            y.square().mean().backward()
            found += [y.detach().clone(), *gradients(model)]
            model.zero_grad()
        model.zero_grad()
    return found


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        out = x * y
        ctx.save_for_backward(x, y, out, None)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, _, out, none = ctx.saved_tensors
        assert none is None
        _, y, again, _ = ctx.saved_tensors
        return g * y + 0 * out, g * x + 0 * again


@program
def own_functions(step: Step) -> list[Tensor]:
    def loss(m: nn.Module, i: int) -> Tensor:
        y = m(batch(i))
        return (ReadsTwice.apply(y, y.sin()) + ReadsTwice.apply(y, y)).mean()

    return train(step, mlp(), loss)


@program
def in_place(step: Step) -> list[Tensor]:
    """Writes that autograd allows: to what it did not save, and to outputs before they are saved."""

    def loss(m: nn.Module, i: int) -> Tensor:
        y = m(batch(i))
        y = (y + 1).mul_(2.0).relu_()
        z = y.sigmoid()
        y = y.clone().add_(z)
        buffer = torch.zeros(16, 32)
        buffer[:8] = y[:8].tanh()
        buffer[8:] = z[8:]
        return (buffer * y).mean()

    return train(step, mlp(), loss)


@program
def norms_convolutions_recurrence(step: Step) -> list[Tensor]:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.lstm = nn.Conv1d(8, 16, 3), nn.BatchNorm1d(16), nn.LSTM(16, 16, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            y = F.max_pool1d(self.norm(self.conv(x)).relu(), 2)
            out, _ = self.lstm(y.transpose(1, 2))
            return out.square().mean()

    model = Mixed()
    # Two forwards before the backward: the second one writes to the running statistics.
    found = train(step, model, lambda m, i: m(noise(4, 8, 34, seed=i)) + m(noise(4, 8, 34, seed=50 + i)))
    return found + [buffer.clone() for buffer in model.buffers() if buffer.is_floating_point()]


@program
def sparse_and_indexed(step: Step) -> list[Tensor]:
    index = integers(16, 2, 40, seed=1)
    matrix = torch.sparse_coo_tensor(index, noise(40, seed=2), (16, 16)).coalesce()

    def loss(m: nn.Module, i: int) -> Tensor:
        y = torch.sparse.mm(matrix, m(batch(i)))
        picked = y[torch.tensor([3, 3, 1, 0])] * y.gather(0, index[:, :32] % 16)[:1]
        values, _ = y.topk(8, 0)
        return picked.mean() + values.cumsum(0).tanh().mean() + y.sort(0).values.prod(0).mean()

    return train(step, mlp(), loss)


@program
def autocast(step: Step) -> list[Tensor]:
    def loss(m: nn.Module, i: int) -> Tensor:
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            y = m(batch(i))
        return y.float().square().mean()

    return train(step, mlp(), loss)


class Experts(nn.Module):
    """Each row goes to one expert: sizes change every step, and some experts get none."""

    def __init__(self, width: int = 32, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return x + out


@program
def experts(step: Step) -> list[Tensor]:
    model = nn.Sequential(nn.LayerNorm(32), Experts(), nn.LayerNorm(32), Experts())
    return train(step, model, lambda m, i: m(batch(i, 48)).square().mean(), 2 * STEPS)


@program
def evaluation_between(step: Step) -> list[Tensor]:
    """Without gradients, in inference mode, and with gradients on and no backward; in steps of their own and not."""
    model, found = mlp(), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for i in range(2 * STEPS):
        with step():
            loss = model(batch(i)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                found += [loss.clone(), model(batch(i + 99))]
        if i % 5 == 4:
            with step(), torch.inference_mode():
                found.append(model(batch(7)).clone())
            with step():
                found.append(model(batch(8)).detach().clone())
            with torch.no_grad():
                found.append(model(batch(9)))
    return found


@program
def changing_shapes_and_branches(step: Step) -> list[Tensor]:
    """A last short batch, one long batch, a branch that flips, a layer left out."""

    def loss(m: nn.Module, i: int) -> Tensor:
        y = batch(i, {5: 7, 8: 40, 14: 3}.get(i, 16))
        for j, layer in enumerate(m.children()):
            if not (i >= 11 and j == 1):
                y = layer(y)
            if i in (4, 9, 10) and j == 2:
                y = (y.tanh() * y.sigmoid()).cos()
        return y.square().mean()

    return train(step, mlp(), loss, 2 * STEPS)


@program
def vectorised(step: Step) -> list[Tensor]:
    """torch.vmap inside."""

    def loss(m: nn.Module, i: int) -> Tensor:
        y = torch.vmap(m)(batch(i).view(4, 4, 32))
        return torch.vmap(lambda row: (row * row.sin()).sum())(y).square().mean()

    return train(step, mlp(), loss)


@program
def loss_scaling(step: Step) -> list[Tensor]:
    """A scaler that skips steps with infinite gradients."""
    model, found = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=256.0, growth_interval=3)
    for i in range(2 * STEPS):
        with step():
            loss = model(batch(i)).square().mean() * (math.inf if i % 5 == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append(torch.tensor(scaler.get_scale()))
    return found + [p.detach().clone() for p in model.parameters()]


@program
def hooks_inside(step: Step) -> list[Tensor]:
    """Saved-tensor hooks of the program's own, and gradient hooks."""

    @contextlib.contextmanager
    def halves() -> Iterator[None]:
        pack = lambda t: (t.detach().half().float(), t.dtype)  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1])):
            yield

    def loss(m: nn.Module, i: int) -> Tensor:
        a, b, c, d = m.children()
        y = a(batch(i))
        with torch.autograd.graph.save_on_cpu():
            y = b(y)
        with halves():
            y = c(y)
        y.register_hook(lambda g: g * 2)
        return d(y).square().mean()

    return train(step, mlp(), loss)


@program
def anomaly_detection(step: Step) -> list[Tensor]:
    def loss(m: nn.Module, i: int) -> Tensor:
        with torch.autograd.detect_anomaly(check_nan=True):
            return m(batch(i)).square().mean()

    return train(step, mlp(layers=2), loss)


@program
def partial_backward(step: Step) -> list[Tensor]:
    """Gradients of some inputs only; a part of the graph is never walked."""
    model, found = mlp(), []
    for i in range(STEPS):
        with step():
            x = batch(i).requires_grad_()
            middle = model[1](model[0](x))
            out = model[3](model[2](middle)).square().mean()
            (g,) = torch.autograd.grad(out, middle, retain_graph=True)
            found += [g, *torch.autograd.grad(out, list(model[1].parameters()))]
    return found


@program
def transformer(step: Step) -> list[Tensor]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(12, device=torch.get_default_device())
    return train(step, model, lambda m, i: m(noise(2, 12, 32, seed=i), mask=mask, is_causal=True).square().mean())


@program
def backward_in_another_thread(step: Step) -> list[Tensor]:
    import threading

    model, found = mlp(), []
    for i in range(STEPS):
        with step():
            loss = model(batch(i)).square().mean()
            worker = threading.Thread(target=loss.backward)
            worker.start()
            worker.join()
            found += [loss.detach().clone(), *gradients(model)]
    return found
