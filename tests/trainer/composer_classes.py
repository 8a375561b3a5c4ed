"""Classes called as Composer calls its own, with what ours read of them; Composer is not needed."""

from typing import Any


def of_composer(kind: type) -> type:
    """Let a class say that it is of Composer."""
    kind.__module__ = "composer.stand_in"
    return kind


@of_composer
class Time:
    def __init__(self, value: float, unit: str) -> None:
        self.value, self.unit = value, unit


def _default_split_batch(batch: Any, size: int) -> Any:
    raise AssertionError("nobody here calls it")


_default_split_batch.__module__ = "composer.core.data_spec"


@of_composer
class DataSpec:
    def __init__(self, dataloader: Any, **functions: Any) -> None:
        self.dataloader = dataloader
        self.batch_transforms = functions.get("batch_transforms", _default_split_batch)
        self.microbatch_transforms = functions.get("microbatch_transforms", _default_split_batch)
        self.split_batch = functions.get("split_batch", _default_split_batch)
        self.get_num_samples_in_batch = functions.get(
            "get_num_samples_in_batch", _default_split_batch
        )
        self._get_num_tokens_in_batch = functions.get(
            "get_num_tokens_in_batch", _default_split_batch
        )

    def get_num_tokens_in_batch(self, batch: Any) -> int:
        return int(self._get_num_tokens_in_batch(batch))


@of_composer
class Evaluator:
    def __init__(
        self,
        *,
        label: str,
        dataloader: Any,
        metric_names: list[str] | None = None,
        subset_num_batches: int | None = None,
        eval_interval: Any = None,
        device_eval_microbatch_size: Any = None,
    ) -> None:
        self.label = label
        self.dataloader = dataloader if isinstance(dataloader, DataSpec) else DataSpec(dataloader)
        self.metric_names = metric_names
        self.subset_num_batches = subset_num_batches
        self.eval_interval = eval_interval
        self.auto_microbatching = device_eval_microbatch_size == "auto"
        self.device_eval_microbatch_size = (
            getattr(self.dataloader.dataloader, "batch_size", None)
            if device_eval_microbatch_size in (None, "auto")
            else device_eval_microbatch_size
        )


def every(value: int, unit: str) -> Any:
    """An interval as an Evaluator keeps it: in a function of a state and an event."""
    time_interval = Time(value, unit)

    def check_interval(state: Any, event: Any) -> bool:
        return bool(time_interval.value)

    return check_interval
