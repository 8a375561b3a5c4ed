"""Where the numbers of a run go: the console, files, TensorBoard, W&B, MLflow, your own place."""

from automicro.loggers.lines import ConsoleLogger, CSVLogger, JSONLinesLogger
from automicro.loggers.logger import Logger, LoggerGroup
from automicro.loggers.servers import LightningLogger, MLflowLogger, TensorBoardLogger, WandbLogger

__all__ = [
    "CSVLogger",
    "ConsoleLogger",
    "JSONLinesLogger",
    "LightningLogger",
    "Logger",
    "LoggerGroup",
    "MLflowLogger",
    "TensorBoardLogger",
    "WandbLogger",
]
