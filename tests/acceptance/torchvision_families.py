"""Families of torchvision, which is not a dependency and is installed into a temporary folder.

``python -m tests.acceptance.torchvision_families FOLDER`` prints one verdict per line.
"""

import functools
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.acceptance.families import verdict_of_model
from tests.acceptance.rows import Batch, Draws

ROWS, SIZE = 4, 2


def pictures(side: int) -> Batch:
    return lambda d: (d.normal(ROWS, 3, side, side), d.whole(0, 3, ROWS))


def films(d: Draws) -> Any:
    return d.normal(ROWS, 3, 4, 16, 16), d.whole(0, 3, ROWS)


def pixels(d: Draws) -> Any:
    return d.normal(ROWS, 3, 32, 32), d.whole(0, 3, ROWS, 32, 32)


def boxes(d: Draws) -> Any:
    corners = [d.uniform(int(n), 2) * 20 for n in d.whole(1, 4, ROWS)]
    targets = [
        {"boxes": torch.cat([each, each + 8], 1), "labels": d.whole(0, 3, len(each))}
        for each in corners
    ]
    return {"images": [d.uniform(3, 32, 32) for _ in range(ROWS)], "targets": targets}


def classified(model: Any, batch: Any) -> Any:
    out = model(batch[0])
    out = out["out"] if isinstance(out, dict) else getattr(out, "logits", out)
    return nn.functional.cross_entropy(out, batch[1])


def detected(model: Any, batch: Any) -> Any:
    return model(batch["images"], batch["targets"])


def detector() -> nn.Module:
    of = importlib.import_module("torchvision.models.detection")
    backbone: Any = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU())
    backbone.out_channels = 8
    anchors = of.anchor_utils.AnchorGenerator(sizes=((8, 16),), aspect_ratios=((1.0,),))
    return of.RetinaNet(backbone, 3, anchor_generator=anchors, min_size=32, max_size=32)  # type: ignore[no-any-return]


def model_of(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        kind = getattr(importlib.import_module("torchvision.models"), name)
        made: nn.Module = kind(**options)
        return made

    return make


def segmenter(name: str) -> Callable[[], nn.Module]:
    return lambda: importlib.import_module("torchvision.models.segmentation").__dict__[name](
        weights=None, weights_backbone=None, num_classes=3
    )


def film_model(name: str) -> Callable[[], nn.Module]:
    return lambda: importlib.import_module("torchvision.models.video").__dict__[name](num_classes=3)


def vit() -> nn.Module:
    sizes = {"image_size": 16, "patch_size": 4, "hidden_dim": 16, "mlp_dim": 24, "num_classes": 3}
    return model_of("VisionTransformer", num_layers=2, num_heads=2, **sizes)()


def swin() -> nn.Module:
    sizes = {"patch_size": [4, 4], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2]}
    return model_of("SwinTransformer", window_size=[4, 4], stochastic_depth_prob=0.0, num_classes=3, **sizes)()  # fmt: skip


def convnext() -> nn.Module:
    block = importlib.import_module("torchvision.models.convnext").CNBlockConfig
    stages = [block(8, 16, 1), block(16, None, 1)]
    return model_of("ConvNeXt", block_setting=stages, stochastic_depth_prob=0.0, num_classes=3)()


TORCHVISION: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    **{
        name: (model_of(name, num_classes=3), pictures(side))
        for name, side in (
            ("alexnet", 64), ("vgg11", 32), ("vgg11_bn", 32), ("squeezenet1_1", 32), ("resnet18", 32),
            ("mobilenet_v2", 32), ("mobilenet_v3_small", 32), ("shufflenet_v2_x0_5", 32),
            ("mnasnet0_5", 32), ("efficientnet_b0", 32), ("regnet_y_400mf", 32), ("densenet121", 32),
        )
    },
    "googlenet": (
        model_of("googlenet", num_classes=3, aux_logits=False, init_weights=True), pictures(32)
    ),
    "VisionTransformer": (vit, pictures(16)),
    "SwinTransformer": (swin, pictures(16)),
    "ConvNeXt": (convnext, pictures(32)),
    "lraspp_mobilenet_v3_large": (segmenter("lraspp_mobilenet_v3_large"), pixels),
    "r3d_18": (film_model("r3d_18"), films),
    "RetinaNet": (detector, boxes),
}  # fmt: skip


@functools.cache
def verdicts() -> dict[str, str]:
    """Return the verdicts of a torchvision for this torch, installed without dependencies."""
    minor = torch.__version__.split(".")[1]
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
        subprocess.run([*install, f"torchvision==0.{int(minor) + 15}.*"], check=True)
        run = [sys.executable, "-m", __name__, folder]
        told = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    lines = [line.partition(" | ") for line in told.splitlines()]
    return {name: verdict for name, _, verdict in lines}


def verdict_of_vision(name: str) -> str:
    return verdicts()[name]


def main(folder: str) -> None:
    sys.path.insert(0, folder)
    # Its operations are compiled for one build of torch; with others, models need only their names.
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("nms", "qnms"):
            signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", signature)
        for name in [name for name in sys.modules if name.startswith("torchvision")]:
            del sys.modules[name]
    for name, (make, batch) in TORCHVISION.items():
        forward = detected if name == "RetinaNet" else classified
        print(name, "|", verdict_of_model(make, batch, SIZE, forward=forward), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
