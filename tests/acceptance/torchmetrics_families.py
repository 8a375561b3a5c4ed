"""Families of torchmetrics: microbatches give the value of the whole batch, or a warning."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, MetricCollection, wrappers
from torchmetrics import classification as of_classes
from torchmetrics import image as of_images

from automicro import Halving, Microbatcher
from automicro.errors import MetricWarning
from tests.outside import Unreached
from tests.torture.engine.sweep import quiet

N = 30
SCALE = torch.linspace(0.2, 1, N)
INPUTS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "classes": lambda: (torch.rand(N, 4).softmax(1), torch.randint(4, (N,))),
    "binary": lambda: (torch.rand(N) * SCALE, torch.randint(2, (N,))),
    "labels": lambda: (torch.rand(N, 3), torch.randint(2, (N, 3))),
    # The first slice has values only between 0 and 1.
    "logits": lambda: (torch.linspace(0.1, 3, N), torch.arange(N) % 2),
    "logits of classes": lambda: (torch.linspace(0.1, 3, 4 * N).view(N, 4), torch.arange(N) % 4),
    "numbers": lambda: (torch.rand(N) * SCALE + 0.1, torch.rand(N) + 0.1),
    "columns": lambda: (torch.rand(N, 3) * SCALE[:, None] + 0.1, torch.rand(N, 3) + 0.1),
    "shares": lambda: (torch.rand(N, 3).softmax(1), torch.rand(N, 3).softmax(1)),
    "images": lambda: (
        torch.rand(N, 1, 16, 16) * SCALE.view(-1, 1, 1, 1),
        torch.rand(N, 1, 16, 16) * SCALE.view(-1, 1, 1, 1),
    ),
    "masks": lambda: (torch.randint(2, (N, 3, 6, 6)), torch.randint(2, (N, 3, 6, 6))),
    "sounds": lambda: (torch.randn(N, 200) * SCALE[:, None], torch.randn(N, 200)),
    "clusters": lambda: (torch.randint(3, (N,)), torch.randint(3, (N,))),
}
# Metrics by their kind of input, with constructor arguments if there are any.
EXACT: list[tuple[str, str, dict[str, Any]]] = [
    *[("classes", f"classification.Multiclass{name}", {"num_classes": 4}) for name in (
        "AUROC", "Accuracy", "AveragePrecision", "CalibrationError", "CohenKappa",
        "ConfusionMatrix", "F1Score", "HammingDistance", "HingeLoss", "JaccardIndex",
        "MatthewsCorrCoef", "NegativePredictiveValue", "Precision", "PrecisionRecallCurve", "ROC",
        "Recall", "Specificity", "StatScores",
    )],
    *[("binary", f"classification.Binary{name}", {}) for name in (
        "AUROC", "Accuracy", "AveragePrecision", "CalibrationError", "CohenKappa",
        "ConfusionMatrix", "EER", "F1Score", "HammingDistance", "HingeLoss", "JaccardIndex",
        "LogAUC", "MatthewsCorrCoef", "Precision", "PrecisionRecallCurve", "ROC", "Recall",
        "Specificity", "StatScores",
    )],
    *[("labels", f"classification.Multilabel{name}", {"num_labels": 3}) for name in (
        "AUROC", "Accuracy", "AveragePrecision", "ConfusionMatrix", "CoverageError", "ExactMatch",
        "F1Score", "HammingDistance", "JaccardIndex", "MatthewsCorrCoef", "Precision",
        "RankingAveragePrecision", "RankingLoss", "Recall", "Specificity", "StatScores",
    )],
    *[("numbers", f"regression.{name}", {}) for name in (
        "ConcordanceCorrCoef", "ContinuousRankedProbabilityScore", "ExplainedVariance",
        "KendallRankCorrCoef", "LogCoshError", "MeanAbsoluteError", "MeanAbsolutePercentageError",
        "MeanSquaredError", "MeanSquaredLogError", "NormalizedRootMeanSquaredError",
        "PearsonCorrCoef", "R2Score", "RelativeSquaredError", "SpearmanCorrCoef",
        "SymmetricMeanAbsolutePercentageError", "TweedieDevianceScore",
        "WeightedMeanAbsolutePercentageError",
    ) if name != "ContinuousRankedProbabilityScore"],
    ("numbers", "regression.MinkowskiDistance", {"p": 3}),
    ("numbers", "regression.CriticalSuccessIndex", {"threshold": 0.5}),
    *[("numbers", "regression.NormalizedRootMeanSquaredError", {"normalization": how})
      for how in ("range", "std", "l2")],
    ("columns", "regression.CosineSimilarity", {"reduction": "mean"}),
    ("columns", "regression.R2Score", {"multioutput": "raw_values"}),
    ("shares", "regression.KLDivergence", {}),
    ("shares", "regression.JensenShannonDivergence", {}),
    ("images", "image.PeakSignalNoiseRatio", {"data_range": 1.0}),
    ("images", "image.PeakSignalNoiseRatioWithBlockedEffect", {"data_range": 1.0}),
    ("images", "image.StructuralSimilarityIndexMeasure", {"data_range": 1.0}),
    ("images", "image.UniversalImageQualityIndex", {}),
    ("images", "image.SpatialCorrelationCoefficient", {}),
    ("images", "image.RootMeanSquaredErrorUsingSlidingWindow", {}),
    ("masks", "segmentation.DiceScore", {"num_classes": 3}),
    ("masks", "segmentation.GeneralizedDiceScore", {"num_classes": 3}),
    ("masks", "segmentation.MeanIoU", {"num_classes": 3}),
    ("masks", "segmentation.HausdorffDistance", {"num_classes": 3}),
    ("sounds", "audio.SignalNoiseRatio", {}),
    ("sounds", "audio.ScaleInvariantSignalNoiseRatio", {}),
    ("sounds", "audio.ScaleInvariantSignalDistortionRatio", {}),
    *[("clusters", f"clustering.{name}", {}) for name in (
        "AdjustedMutualInfoScore", "AdjustedRandScore", "CompletenessScore", "FowlkesMallowsIndex",
        "HomogeneityScore", "MutualInfoScore", "NormalizedMutualInfoScore", "RandScore",
        "VMeasureScore",
    )],
    *[("clusters", f"nominal.{name}", {"num_classes": 3}) for name in (
        "CramersV", "PearsonsContingencyCoefficient", "TheilsU", "TschuprowsT",
    )],
]  # fmt: skip


NAMED: dict[str, tuple[Callable[[], Any], str, str]] = {
    "Running": (lambda: wrappers.Running(MeanSquaredError(), 3), "numbers", "last 3 updates"),
    "Running in a collection": (
        lambda: MetricCollection({"it": wrappers.Running(MeanSquaredError(), 2)}),
        "numbers",
        "last 2 updates",
    ),
    "BootStrapper": (lambda: wrappers.BootStrapper(MeanSquaredError(), 4), "numbers", "draws random numbers"),
    "SSIM": (of_images.StructuralSimilarityIndexMeasure, "images", "data_range"),
    "logits": (of_classes.BinaryAccuracy, "logits", "BinaryAccuracy treats its numbers as prob"),
    "logits of classes": (
        lambda: of_classes.MulticlassAUROC(4), "logits of classes", "softmax",
    ),
    "logits in a collection": (
        lambda: MetricCollection([of_classes.BinaryF1Score(), of_classes.BinaryAccuracy()]),
        "logits",
        "as logits otherwise",
    ),
}  # fmt: skip


class Given(nn.Module):
    """Returns its input; runs out of memory at one of its calls."""

    calls = Unreached()

    def __init__(self, fails_at: int = 0) -> None:
        super().__init__()
        self.fails_at, self.calls = fails_at, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return x


def numbers(value: Any) -> Tensor:
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value)]
    if isinstance(value, list | tuple):
        return torch.cat([numbers(each) for each in value])
    return torch.nan_to_num(torch.as_tensor(value, dtype=torch.float64).flatten())


def made(name: str, options: dict[str, Any]) -> Callable[[], Any]:
    package, _, kind = name.partition(".")
    module = importlib.import_module(f"torchmetrics.{package}")
    return lambda: getattr(module, kind)(**options)


METRICS: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        f"{name} {' '.join(f'{k}={v}' for k, v in options.items())}".strip(): (
            made(name, options), given
        )
        for given, name, options in EXACT
    },
    **{name: (make, given) for name, (make, given, _) in NAMED.items()},
}  # fmt: skip


def verdict_of_metric(name: str) -> str:
    """Return the verdict on values over slices, without failures and after a failed attempt."""
    make, given = METRICS[name]
    torch.manual_seed(0)
    batch = INPUTS[given]()
    again: Any = Halving(initial=16, refine=False)
    with quiet(), warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        whole, *split = make(), make(), make()
        whole.update(*batch)
        for metric, policy, fails_at in zip(split, (7, again), (0, 2), strict=True):
            Microbatcher(
                Given(fails_at),
                loss_fn=lambda out, _: out.double().mean(),
                eval_microbatch_size=policy,
                probe=False,
            ).evaluate(batch, metric)
        torch.manual_seed(0)
        expected = numbers(whole.compute())
        found = [numbers(metric.compute()) for metric in split]
    is_named = any(each.category is MetricWarning for each in heard)
    is_exact = all(torch.allclose(one, expected, rtol=1e-4, atol=1e-5) for one in found)
    if is_exact:
        return "exact, and named: MetricWarning" if is_named else "exact"
    return "named: MetricWarning" if is_named else "differs"
