"""Jobs built from a combination: new copies of everything that a user would write."""

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from automicro import Microbatcher
from automicro.features import with_features
from tests.oracle.averages import Denominator, Loss, per_batch, per_row
from tests.oracle.contents import CLASSES, FEATURES, Content, make_contents
from tests.oracle.forms import FORMS, Form, pair_of
from tests.oracle.losses import LOSSES
from tests.oracle.metrics import METRICS, MetricKind
from tests.oracle.models import MODELS, Model

WIRINGS = (
    "loss_fn",
    "loss_fn, which holds the model",
    "forward",
    "forward with outputs",
    "keywords",
    "Composer",
    "a parameter in a closure",
    "a tensor in a closure",
    "a module in a closure",
    "a module that is named",
    "modules that overlap",
    "a teacher that trains its BatchNorm",
    "a moving-average teacher",
)
TWISTS = (
    "none",
    "hooks that clamp",
    "hooks that scale",
    "hooks that step",
    "hooks after accumulation",
    "hooks that replace the gradient",
    "hooks of both kinds",
    "hooks on all together",
    "a graph of the backward",
    "gradients are kept",
    "gradients are zeroed in place",
    "gradients are views of a bucket",
    "two microbatchers",
    "optimizer given",
    "own backward",
    "freezes later",
    "evaluates between",
)
PAIRS = ("loss_fn", "loss_fn, which holds the model")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Combination:
    """Names of ingredients, and the position of a fault. Made from a seed."""

    seed: int
    model: str
    loss: str
    declares: bool
    wiring: str
    twist: str
    form: str
    late: str
    metric: str | None
    size: int
    second_size: int
    num_rows: tuple[int, ...]
    dtype: str
    optimizer: str
    fault: str
    fault_batch: int
    fault_place: float

    def plain(self, **changes: Any) -> "Combination":
        """Return the same combination without twist, fault or metric."""
        return dataclasses.replace(self, twist="none", fault="none", metric=None, **changes)

    def __str__(self) -> str:
        words = [self.model, self.loss + (", declared" if self.declares else "")]
        words += [self.wiring, self.form]
        words += [f"{self.late} late"] if self.late != "nothing" else []
        words += [word for word in (self.twist, self.fault) if word != "none"]
        words += [f"metric: {self.metric}"] if self.metric else []
        words += [self.dtype] if self.dtype != "float64" else []
        words += [f"rows {list(self.num_rows)}", f"size {self.size}"]
        return " | ".join(words)

    @property
    def parts(self) -> tuple[Model, Loss]:
        return MODELS[self.model], LOSSES[self.loss]

    @property
    def draws(self) -> bool:
        model, loss = self.parts
        return model.draws or loss.draws

    @property
    def taken(self) -> Denominator:
        """The divisor that automicro assumes for the loss."""
        loss = self.parts[1]
        if self.declares and loss.true is not None:
            return loss.true
        if self.wiring == "loss_fn" and loss.read is not None:
            return loss.read
        return per_row

    @property
    def has_wrong_average(self) -> bool:
        return self.parts[1].true is not self.taken


class Job:
    """All objects of one run. `whole` is the loss of a batch in plain torch."""

    def __init__(self, combination: Combination) -> None:
        self.of = combination
        kind, ingredient = combination.parts
        seed_all(combination.seed)
        dtype = DTYPES[combination.dtype]
        self.model: nn.Module = kind.build().to(dtype)
        self.loss = ingredient.make()
        if isinstance(self.loss, nn.Module):
            self.loss.to(dtype)
        self.heard: list[float] = []  # gradients seen by hooks
        self.extra: dict[str, Any] = {}  # parameters, leaves and modules held by a closure
        self.options: dict[str, Any] = {}
        self.form: Form = FORMS[combination.form]
        self.compute = computing(self.loss, ingredient)
        self.rows_of = reading(combination.wiring, self.form)
        self.contents = make_contents(
            combination.seed, kind.shape, list(combination.num_rows), combination.late, dtype
        )
        self.metric_kind: MetricKind | None = METRICS.get(combination.metric or "")
        self.metric = self.metric_kind.make() if self.metric_kind else None
        self._wire(dtype)
        self._declare()
        self.leaves = dict(self._named_leaves())
        self._make_optimizer()
        self._twist()

    # Computation

    def make_batch(self, content: Content, index: int) -> Any:
        if self.of.wiring in PAIRS:
            return pair_of(content, self.of.parts[1].target)
        if self.of.wiring in ("keywords", "Composer"):
            return dict(content.rows)
        return self.form.make(content, index)

    def whole(self, batch: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
        """Return the loss of a batch, its parts by name, and the outputs."""
        if self.of.wiring in PAIRS:
            out = self.model(batch[0])
            return *read_loss(self.options["loss_fn"](out, batch[1])), out
        if self.of.wiring == "keywords":
            result = self.model(**batch)
            return result["loss"], {}, result["logits"]
        if self.of.wiring == "Composer":
            model: Any = self.model
            out = model(batch)
            return *read_loss(model.loss(out, batch)), out
        result = self.options["forward"](self.model, batch)
        out = None
        if isinstance(result, tuple):
            result, out = result
        return *read_loss(result), out

    # Arguments for automicro

    def _wire(self, dtype: torch.dtype) -> None:
        wiring = self.of.wiring
        if wiring in PAIRS:
            holds = wiring != "loss_fn"
            self.options["loss_fn"] = HoldsModel(self.model, self.loss) if holds else self.loss
        elif wiring == "keywords":
            self.model = Keywords(self.model, self)
        elif wiring == "Composer":
            self.model = ComposerStyle(self.model, self)
        else:
            self.options.update(self.form.options)
            self.options["forward"] = self._forward(wiring, dtype)
        if self.metric_kind is not None:
            feed, rows_of = self.metric_kind.update, self.rows_of

            def update(metric: Any, out: Any, batch: Any) -> None:
                feed(metric, read_outputs(out), rows_of(batch))

            self.options["update_metric"] = update

    def _forward(self, wiring: str, dtype: torch.dtype) -> Callable[[Any, Any], Any]:
        change: Callable[[Any], Any] = lambda model: model  # noqa: E731
        if wiring == "a parameter in a closure":
            scale = nn.Parameter(torch.linspace(0.5, 1.5, CLASSES, dtype=dtype))
            self.extra["scale"] = scale
            change = lambda model: Wrapped(model, lambda inner, x: inner(x) * scale)  # noqa: E731
        elif wiring == "a tensor in a closure":
            shift = torch.linspace(-1, 1, CLASSES, dtype=dtype, requires_grad=True)
            self.extra["shift"] = shift
            change = lambda model: Wrapped(model, lambda inner, x: inner(x) + shift)  # noqa: E731
        elif wiring in ("a module in a closure", "a module that is named", "modules that overlap"):
            head = nn.Linear(CLASSES, CLASSES).to(dtype)
            self.extra["head"] = head
            change = lambda model: Wrapped(model, lambda inner, x: head(inner(x)))  # noqa: E731
            if wiring == "a module that is named":
                self.options["modules"] = [head]
            elif wiring == "modules that overlap":
                self.options["modules"] = [head, *self.model.children(), self.model]
        teacher: Any = None
        if wiring == "a teacher that trains its BatchNorm":
            teacher = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES)).to(dtype)
        elif wiring == "a moving-average teacher":
            teacher = copy.deepcopy(self.model).eval()
        if teacher is not None:
            teacher.requires_grad_(False)
            self.extra["teacher"] = teacher
        gives_outputs = wiring == "forward with outputs" or self.metric is not None
        read, compute = self.form.read, self.compute

        def forward(model: Any, batch: Any) -> Any:
            rows = read(batch)
            if teacher is not None:
                with torch.no_grad():
                    rows = {**rows, "t": rows["t"] + teacher(rows["x"]).detach()}
            out, loss = compute(change(model), rows)
            return (loss, out.detach()) if gives_outputs and out is not None else loss

        return forward

    def _declare(self) -> None:
        true = self.of.parts[1].true
        if not self.of.declares or true is None:
            return
        if true is per_batch:
            self.options["loss_average"] = "none"
        elif true is per_row:
            self.options["loss_average"] = "samples"
        else:
            rows_of = self.rows_of
            self.options["loss_average"] = lambda batch: true(rows_of(batch))

    # Training

    def modules(self) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {"model": self.model}
        if isinstance(self.loss, nn.Module):
            found["loss"] = self.loss
        held = {n: m for n, m in self.extra.items() if isinstance(m, nn.Module)}
        return {**found, **held}

    def _named_leaves(self) -> Iterator[tuple[str, Tensor]]:
        for prefix, module in self.modules().items():
            for name, parameter in module.named_parameters():
                yield f"{prefix}.{name}", parameter
        for name, value in self.extra.items():
            if isinstance(value, Tensor):
                yield name, value

    def _make_optimizer(self) -> None:
        self.trained = [leaf for leaf in self.leaves.values() if leaf.requires_grad]
        known = {id(leaf): leaf for leaf in self.trained}
        self.trained = list(known.values())
        has_sparse = any(getattr(m, "sparse", False) for m in self.model.modules())
        if self.of.optimizer == "momentum" and not has_sparse:
            self.optimizer: torch.optim.Optimizer = torch.optim.SGD(
                self.trained, lr=0.05, momentum=0.9
            )
        elif self.of.optimizer == "adam" and not has_sparse:
            self.optimizer = torch.optim.Adam(self.trained, lr=0.01, eps=1e-2)
        else:
            self.optimizer = torch.optim.SGD(self.trained, lr=0.05)

    def _twist(self) -> None:
        twist = self.of.twist
        self.steps_in_hooks = twist == "hooks that step"
        self.scale = 8.0 if twist == "own backward" else 1.0
        heard = self.heard

        def hear(gradient: Tensor, scale: float = 1.0) -> Tensor:
            heard.append(float(gradient.norm()))
            return gradient * scale

        def hear_later(parameter: Tensor) -> None:
            assert parameter.grad is not None
            hear(dense(parameter.grad))

        def halve(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
            hear_later(parameter)

        def replace(parameter: Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 0.5
            hear_later(parameter)

        before: dict[str, list[Callable[[Tensor], Tensor]]] = {
            "hooks that clamp": [lambda grad: hear(grad).clamp(-0.02, 0.02)],
            "hooks that scale": [lambda grad: hear(grad, 0.5)],
            "hooks of both kinds": [lambda grad: hear(grad, 0.5)],
        }
        after: dict[str, list[Callable[[Tensor], None]]] = {
            "hooks after accumulation": [halve],
            "hooks that replace the gradient": [replace],
            "hooks of both kinds": [hear_later],
        }
        for leaf in self.trained:
            for hook in before.get(twist, ()):
                leaf.register_hook(hook)
            for last in after.get(twist, ()):
                leaf.register_post_accumulate_grad_hook(last)
        if twist == "hooks on all together":
            torch.autograd.graph.register_multi_grad_hook(
                tuple(self.trained),
                lambda found: heard.extend(
                    float(each.norm()) for each in found if each is not None
                ),
            )
        elif twist == "a graph of the backward":
            self.options["backward"] = lambda loss: loss.backward(create_graph=True)
        elif self.steps_in_hooks:
            for leaf in self.trained:
                own = torch.optim.SGD([leaf], lr=0.05)

                def step(parameter: Tensor, own: torch.optim.Optimizer = own) -> None:
                    own.step()
                    own.zero_grad()

                leaf.register_post_accumulate_grad_hook(step)
        elif twist == "optimizer given":
            self.options["optimizer"] = self.optimizer
        elif twist == "own backward":
            self.options["backward"] = lambda loss: (loss * self.scale).backward()

    # One step

    def before_batch(self, index: int) -> None:
        twist = self.of.twist
        if twist == "gradients are zeroed in place":
            self.optimizer.zero_grad(set_to_none=False)
        elif twist == "gradients are views of a bucket":
            self._fill_a_bucket()
        elif twist != "gradients are kept" or index % 2 == 0:
            for leaf in self.leaves.values():
                leaf.grad = None
        if twist == "freezes later" and index == 1:
            next(iter(self.model.parameters())).requires_grad_(False)

    def _fill_a_bucket(self) -> None:
        """Create gradients in advance, as DDP does with gradient_as_bucket_view."""
        leaves = self.trained
        bucket = torch.ones(sum(leaf.numel() for leaf in leaves), dtype=leaves[0].dtype)
        for leaf, part in zip(leaves, bucket.split([p.numel() for p in leaves]), strict=True):
            leaf.grad = part.view_as(leaf)

    def after_backward(self) -> dict[str, Tensor | None]:
        """Return the gradients that the optimizer is about to use."""
        if self.scale != 1:
            for leaf in self.leaves.values():
                if leaf.grad is not None:
                    leaf.grad /= self.scale
        return {
            name: None if leaf.grad is None else dense(leaf.grad)
            for name, leaf in self.leaves.items()
        }

    def step(self) -> None:
        if not self.steps_in_hooks:
            self.optimizer.step()
        teacher = self.extra.get("teacher")
        if self.of.wiring == "a moving-average teacher" and teacher is not None:
            with torch.no_grad():
                for moving, now in zip(teacher.parameters(), self.model.parameters(), strict=True):
                    moving.lerp_(now, 0.3)

    def microbatchers(self, size: Any) -> list[Microbatcher]:
        count = 2 if self.of.twist == "two microbatchers" else 1
        options = {"microbatch_size": size, **self.options}
        return [Microbatcher(self.model, **with_features(options)) for _ in range(count)]

    # State that must be unchanged, or correct

    def parameters(self) -> dict[str, Tensor]:
        return {name: leaf.detach().clone() for name, leaf in self.leaves.items()}

    def buffers(self) -> dict[str, Tensor]:
        return {
            f"{prefix}.{name}": buffer.detach().clone()
            for prefix, module in self.modules().items()
            for name, buffer in module.named_buffers()
        }

    def attributes(self) -> dict[str, Any]:
        """Return modes and plain Python state of all modules."""
        found: dict[str, Any] = {}
        for prefix, module in self.modules().items():
            for name, each in module.named_modules():
                for key, value in vars(each).items():
                    if not key.startswith("_") and isinstance(value, int | float | list):
                        found[f"{prefix}.{name}.{key}"] = copy.copy(value)
        found["hooks called"], found["hooks heard"] = len(self.heard), sum(self.heard)
        return found

    def metric_value(self) -> Any:
        return None if self.metric_kind is None else self.metric_kind.read(self.metric)


# automicro captures everything that a forward reaches, so no closure here may hold a whole job.


def computing(loss: Callable[..., Any], kind: Loss) -> Callable[[Any, Mapping[str, Any]], Any]:
    """Return a function that computes outputs and loss of a model and rows."""
    is_program, target = kind.is_program, kind.target

    def compute(model: Any, rows: Mapping[str, Any]) -> Any:
        if is_program:
            return None, loss(model, rows)
        out = model(rows["x"])
        return out, loss(out, rows if target == "all" else rows[target])

    return compute


def reading(wiring: str, form: Form) -> Callable[[Any], Mapping[str, Any]]:
    """Return a function that reads the rows of a batch without changing it."""
    if wiring in PAIRS:
        return lambda batch: (
            batch[1]
            if isinstance(batch[1], Mapping)
            else {"x": batch[0], "w": batch[0], "y": batch[1], "t": batch[1]}
        )
    read = form.read
    return (lambda batch: read(copy.deepcopy(batch))) if form.edits else read


class Wrapped(nn.Module):
    """A model and something after it, created again in each forward, as closures do."""

    def __init__(self, inner: nn.Module, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: Any) -> Any:
        return self.function(self.inner, x)


class HoldsModel(nn.Module):
    """A loss that refers to the model, as penalties do."""

    def __init__(self, model: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.inner = model, loss

    def forward(self, out: Any, targets: Any) -> Any:
        decay = sum((p**2).sum() for p in self.model.parameters() if p.requires_grad)
        total, _parts = read_loss(self.inner(out, targets))
        return total + 0.01 * decay


class Keywords(nn.Module):
    """A model with Hugging Face's convention."""

    def __init__(self, inner: nn.Module, job: Job) -> None:
        super().__init__()
        self.inner = inner
        self.compute = job.compute
        if isinstance(job.loss, nn.Module):
            self.loss_module = job.loss

    def forward(self, **rows: Any) -> Any:
        out, loss = self.compute(self.inner, rows)
        return {"loss": read_loss(loss)[0], "logits": out}


class ComposerStyle(nn.Module):
    """A model with Composer's interface."""

    def __init__(self, inner: nn.Module, job: Job) -> None:
        super().__init__()
        self.inner = inner
        self.held, self.target = job.loss, job.of.parts[1].target

    def forward(self, batch: Any) -> Any:
        return self.inner(batch["x"])

    def loss(self, out: Any, batch: Any) -> Any:
        return self.held(out, batch if self.target == "all" else batch[self.target])

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return self.inner(batch["x"]) if outputs is None else outputs


def read_loss(result: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss, and named losses, of which those with a gradient are summed."""
    if isinstance(result, Tensor):
        return result, {}
    if "loss" in result:
        return result["loss"], {name: v for name, v in result.items() if name != "loss"}
    trained = [value for value in result.values() if value.requires_grad]
    return sum(trained[1:], trained[0]) if trained else sum(result.values()), dict(result)


def read_outputs(out: Any) -> Any:
    return out.get("logits") if isinstance(out, Mapping) else out


def dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.to_dense() if tensor.is_sparse else tensor).clone()


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_states() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
    }
