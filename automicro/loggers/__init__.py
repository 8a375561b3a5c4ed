"""Loggers for the values of a run: JSON lines, TensorBoard, W&B, MLflow, or your own."""

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
