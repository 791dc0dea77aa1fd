"""Measure Opacus's ghost clipping and plain step on the networks of `_networks.py`.

    python benchmarks/opacus_ghost.py [mlp cnn wide_resnet transformer]

`clipping.py` runs this script. Each network has its own result.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
from _results import Table, parser, print_tables, write
from _timing import said, take_turns
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.nn import functional

ROUNDS = 5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NETWORKS = ["mlp", "cnn", "wide_resnet", "transformer"]


class Block(nn.Module):
    """A pre-norm block whose attention consists of layers that Opacus can hook."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map f[b, t, width] to f[b, t, width]."""
        y = self.one(x)
        split = [
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        ]
        mixed = functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.two(x))))


class Transformer(nn.Module):
    """A transformer without tied embeddings.

    For tied embeddings, Opacus's ghost norms omit the cross terms.
    """

    def __init__(self, width: int = 256, vocabulary: int = 8000) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(128, width)
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(4)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits f[b, t, vocabulary]."""
        places = torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1)
        x = self.embedding(ids) + self.position(places)
        return self.head(self.norm(self.blocks(x)))


def mlp() -> Any:
    sizes = (784, 1024, 1024, 10)
    layers = [nn.Linear(m, n) for m, n in itertools.pairwise(sizes)]
    net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    return net, torch.randn(256, 784), torch.arange(256) % 10


def cnn() -> Any:
    layers: list[nn.Module] = []
    for m, n in ((3, 32), (32, 64), (64, 64)):
        conv = nn.Conv2d(m, n, 3, padding=1, bias=False)
        layers += [conv, nn.GroupNorm(8, n), nn.ReLU(), nn.AvgPool2d(2)]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 10))
    return net, torch.randn(64, 3, 32, 32), torch.arange(64) % 10


class Residual(nn.Module):
    """Two convolutions, each after GroupNorm and relu, added to a skip connection."""

    def __init__(self, m: int, n: int, stride: int, project: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(16, m), nn.GroupNorm(16, n)])
        self.one = nn.Conv2d(m, n, 3, stride, padding=1, bias=False)
        self.two = nn.Conv2d(n, n, 3, padding=1, bias=False)
        self.skip = nn.Conv2d(m, n, 1, stride, bias=False) if project else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images f[b, c, h, w] to images."""
        y = functional.relu(self.norms[0](x))
        x = x if self.skip is None else self.skip(y)
        return x + self.two(functional.relu(self.norms[1](self.one(y))))


def wide_resnet() -> Any:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False)]
    for m, n, stride in ((16, 64, 1), (64, 128, 2), (128, 256, 2)):
        layers += [Residual(m, n, stride, True), Residual(n, n, 1, False)]
    head = [nn.GroupNorm(16, 256), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = nn.Sequential(*layers, *head, nn.Linear(256, 10))
    return net, torch.randn(16, 3, 32, 32), torch.arange(16) % 10


def transformer() -> Any:
    ids = torch.randint(0, 8000, (8, 129))
    return Transformer(), ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def steps(name: str) -> dict[str, Callable[[], None]]:
    """Return PyTorch's plain step and Opacus's step, on two copies of the network."""
    net, x, y = (part.to(DEVICE) for part in globals()[name]())
    criterion = nn.CrossEntropyLoss()
    private = GradSampleModuleFastGradientClipping(
        copy.deepcopy(net), max_grad_norm=1.0, use_ghost_clipping=True
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(private.parameters(), lr=0.0),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=len(x),
    )
    clipped_loss = DPLossFastGradientClipping(
        private, optimizer, criterion, loss_reduction="mean"
    )

    def wait() -> None:
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    def plain() -> None:
        net.zero_grad()
        criterion(net(x).flatten(0, -2), y.flatten()).backward()
        wait()

    def ghost() -> None:
        optimizer.zero_grad()
        logits = private(x)
        shape = logits.shape if logits.ndim == 3 else None
        clipped_loss(logits.flatten(0, -2), y.flatten(), shape=shape).backward()
        wait()

    return {"PyTorch, plain gradient": plain, "Opacus, ghost clipping": ghost}


def main() -> None:
    """Measure the named networks, one after the other."""
    options = parser(__doc__)
    options.add_argument("networks", nargs="*", metavar="NETWORK", default=NETWORKS)
    options.add_argument("--seconds", type=float, default=4.0, help="for each function")
    arguments = options.parse_args()
    columns = {"": "{}", "ms": "{:.1f}", "minimum to maximum, ms": "{:.1f} to {:.1f}"}
    for name in arguments.networks:
        times = take_turns(steps(name), rounds=ROUNDS, seconds=arguments.seconds)
        rows = [
            [label, 1e3 * t.median, [1e3 * t.least, 1e3 * t.most], t.count]
            for label, t in times.items()
        ]
        table = Table("contenders", columns | {"calls": "{}"}, rows)
        print(f"\n{name}")
        print_tables(table)
        write(
            f"opacus_ghost.{name}",
            arguments,
            [table],
            packages=["torch", "opacus"],
            device=DEVICE,
            times=said(ROUNDS, arguments.seconds),
        )


if __name__ == "__main__":
    main()
