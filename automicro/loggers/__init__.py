"""Where the numbers of a run go: the console, files, TensorBoard, W&B, MLflow, your own place."""

from automicro.loggers.base import Logger
from automicro.loggers.console import ConsoleLogger
from automicro.loggers.csv import CSVLogger
from automicro.loggers.group import LoggerGroup
from automicro.loggers.json_lines import JSONLinesLogger
from automicro.loggers.lightning import LightningLogger
from automicro.loggers.mlflow import MLflowLogger
from automicro.loggers.tensorboard import TensorBoardLogger
from automicro.loggers.wandb import WandbLogger

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
