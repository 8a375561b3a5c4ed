"""Where the numbers of a run go: files, TensorBoard, W&B, MLflow, your own place."""

from automicro.loggers.lines import JSONLinesLogger
from automicro.loggers.logger import Logger, LoggerGroup
from automicro.loggers.servers import MLflowLogger, TensorBoardLogger, WandbLogger

__all__ = [
    "JSONLinesLogger",
    "Logger",
    "LoggerGroup",
    "MLflowLogger",
    "TensorBoardLogger",
    "WandbLogger",
]
