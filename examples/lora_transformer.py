"""Train a small language model on public text, and fine-tune it privately by LoRA.

    python examples/lora_transformer.py [--devices 8]

The public text is the docstrings of Python's standard library. The docstrings of NumPy
and SciPy stand for the private text. The program first trains a causal transformer over
characters on the public text, without privacy. It then freezes these weights, and
trains low-rank adapters on the private text with `dpjax.plan`. The unit of privacy is
one sequence of characters, and not a docstring or its author. With `--devices`, the
batch, the weights, the adapters, the optimizer's moments and the noise are sharded over
virtual devices of the CPU.
"""

import argparse
import ast
import functools
import math
import pathlib
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dpjax

VOCABULARY = 128  # all of ASCII, so that it depends on no text
HEADS = 2
LINE = 40  # no line of at least 40 characters is in two of the three texts
DELTA = 1e-6  # less than 1 / (number of private sequences)


def read_docstrings(folder, limit):
    """The docstrings below a folder, without tests, until they have `limit` letters."""
    result, length = [], 0
    for path in sorted(pathlib.Path(folder).rglob("*.py")):
        folders = path.relative_to(folder).parts
        if any(x in ("test", "tests") or x.endswith("-packages") for x in folders):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                result.append(text)
                length += len(text)
        if length >= limit:
            break
    return result


def lines_of(texts):
    """The lines of the texts that are long enough to identify their text."""
    lines = (line.strip() for text in texts for line in text.splitlines())
    return {line for line in lines if len(line) >= LINE}


def cut(texts, length):
    """Cut each text into sequences u8[n, length + 1], and leave out its remainder."""
    rows = []
    for text in texts:
        codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
        whole = len(codes) // (length + 1)
        rows.append(codes[: whole * (length + 1)].reshape(whole, length + 1))
    return np.concatenate(rows)


def load_texts(limit):
    """Public, private and held-out docstrings, of at most about `limit` letters each.

    No line of at least `LINE` characters is in two of these three sets. Each docstring
    is in at most one set, as a whole. The choice of this set reads only the docstring
    itself, its position in the list of docstrings, and docstrings that are not private.
    """
    public = read_docstrings(sysconfig.get_path("stdlib"), limit)
    others = []
    for library in ("numpy", "scipy"):
        folder = pathlib.Path(__import__(library).__file__).parent
        others += read_docstrings(folder, limit)
    held_out = others[::10]
    private = [text for i, text in enumerate(others) if i % 10]
    known = lines_of(public)
    held_out = [text for text in held_out if known.isdisjoint(lines_of([text]))]
    known |= lines_of(held_out)
    private = [text for text in private if known.isdisjoint(lines_of([text]))]
    return public, private, held_out


def normal(key, *shape):
    return jax.random.normal(key, shape) / math.sqrt(shape[-2])


def init_base(key, width, layers, length):
    """Draw the transformer's weights; the weights of all layers are stacked."""
    shapes = dict.fromkeys(("query", "key", "value", "out"), (width, width))
    shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    keys = iter(jax.random.split(key, 9))
    return {
        "embed": normal(next(keys), VOCABULARY, width),
        "position": normal(next(keys), length, width),
        "layers": {k: normal(next(keys), layers, *n) for k, n in shapes.items()},
        "read": normal(next(keys), width, VOCABULARY),
    }


def init_adapters(key, base, rank):
    """A is random and B is zero, so that the adapters change nothing at first."""
    adapters = {}
    for number, (name, weights) in enumerate(base["layers"].items()):
        layers, inputs, outputs = weights.shape
        a = normal(jax.random.fold_in(key, number), layers, inputs, rank)
        adapters[name] = {"A": a, "B": jnp.zeros((layers, rank, outputs))}
    return adapters


def scaled(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)


def loss(adapters, sequence, base):
    """The mean negative log likelihood of one sequence's characters."""
    inputs, targets = sequence[:-1].astype(int), sequence[1:].astype(int)
    x = base["embed"][inputs] + base["position"]
    causal = jnp.tril(jnp.ones((len(inputs), len(inputs)), bool))

    def layer(x, weights):
        frozen, beside = weights

        def dense(name, x):
            y = x @ frozen[name]
            if beside is None:
                return y
            return y + (x @ beside[name]["A"]) @ beside[name]["B"]

        def heads(name):
            return dense(name, scaled(x)).reshape(len(inputs), HEADS, -1)

        query = heads("query") / math.sqrt(x.shape[-1] / HEADS)
        scores = jnp.einsum("thc,shc->hts", query, heads("key"))
        attention = jax.nn.softmax(jnp.where(causal[None], scores, -jnp.inf))
        mixed = jnp.einsum("hts,shc->thc", attention, heads("value"))
        x = x + dense("out", mixed.reshape(x.shape))
        return x + dense("down", jax.nn.gelu(dense("up", scaled(x)))), None

    x, _ = jax.lax.scan(layer, x, (base["layers"], adapters))
    logits = scaled(x) @ base["read"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@jax.jit
def mean_loss(adapters, sequences, base):
    return jax.vmap(loss, (None, 0, None))(adapters, sequences, base).mean()


def train(value_and_grad, optimizer, params, batches, *others):
    """Make a step on each batch, and return the final parameters."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, batch, *others):
        _, grads = value_and_grad(params, batch, *others)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, params)  # `step` donates the copy
    state = optimizer.init(params)
    for batch in batches:
        params, state = step(params, state, batch, *others)
    return params


def main(
    devices=1,
    epsilons=(3.0, 8.0),
    width=48,
    layers=2,
    length=48,
    rank=4,
    limit=1_500_000,
    public_steps=800,
    num_steps=80,
    batch_size=256,
    microbatch_size=48,
):
    """Train, print perplexities, and return the adapters of each private run."""
    kinds = (jax.sharding.AxisType.Auto,)  # the compiler chooses shardings
    mesh = jax.make_mesh((devices,), ("all",), kinds, devices=jax.devices()[:devices])
    split = jax.NamedSharding(mesh, jax.P("all"))

    def shard(x):
        """Divide an array's longest axis among the devices."""
        axes = [None] * x.ndim
        axes[int(np.argmax(x.shape))] = "all"
        return jax.device_put(x, jax.NamedSharding(mesh, jax.P(*axes)))

    public, private, held_out = (cut(texts, length) for texts in load_texts(limit))
    print(f"{len(public):,} public sequences, {len(private):,} private ones")
    rng = np.random.default_rng(0)  # the public training needs no secret
    start = init_base(jax.random.key(0), width, layers, length)
    rows = (public[rng.integers(len(public), size=64)] for _ in range(public_steps))
    adam = optax.adam(optax.cosine_decay_schedule(4e-3, public_steps))
    public_grad = jax.value_and_grad(lambda base, rows: mean_loss(None, rows, base))
    base = train(public_grad, adam, start, rows)
    base = jax.tree.map(shard, base)
    adapters = jax.tree.map(shard, init_adapters(jax.random.key(1), base, rank))
    some = rng.permutation(len(held_out) // 8 * 8)[:2048]  # a multiple of 8
    tested = jax.device_put(held_out[some], split)

    def report(name, adapters):
        result = math.exp(mean_loss(adapters, tested, base))
        print(f"held-out perplexity {result:6.3f} {name}", flush=True)

    report("before fine-tuning", adapters)
    # Whole microbatches, with room for batches five standard deviations above the mean.
    parts = math.ceil((batch_size + 5 * math.sqrt(batch_size)) / microbatch_size)
    settings = {"batch_size": batch_size, "num_steps": num_steps, "delta": DELTA}
    settings |= {"max_batch_size": parts * microbatch_size, "clip_norm": 1.0}
    trained, in_parts = {}, {"microbatch_size": microbatch_size}
    for epsilon in epsilons:
        plan = dpjax.plan(num_examples=len(private), epsilon=epsilon, **settings)
        value_and_grad = plan.value_and_grad(loss, batched=False, **in_parts)
        key = dpjax.random_key()  # secret, and used only in this run
        optimizer = plan.optimizer(optax.adam(1e-2), key=key)
        batches = plan.batches(private, key=key, sharding=split, prefetch=2)
        trained[epsilon] = train(value_and_grad, optimizer, adapters, batches, base)
        report(f"after private fine-tuning, ε = {epsilon:g}", trained[epsilon])
        print(plan.guarantee)
    # The same sums without noise; the clip norm is so large that nothing is clipped.
    clipped = dpjax.clipped_grad(loss, 1e9, **in_parts)

    def without_privacy(adapters, batch, base):
        sums, _ = clipped(adapters, batch.data, base, mask=batch.mask)
        return None, sums  # Adam's steps do not depend on the scale of its gradients

    batches = plan.batches(private, key=dpjax.random_key(), sharding=split)
    free = train(without_privacy, optax.adam(1e-2), adapters, batches, base)
    report("after fine-tuning without privacy", free)
    return trained


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--devices", type=int, default=1, help="virtual devices")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    main(arguments.devices)
