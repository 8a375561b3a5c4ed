"""Where the numbers of a run go: the console, JSON lines, CSV, TensorBoard, or your own place."""

from automicro.loggers.base import Logger
from automicro.loggers.console import ConsoleLogger
from automicro.loggers.csv import CSVLogger
from automicro.loggers.group import LoggerGroup
from automicro.loggers.json_lines import JSONLinesLogger
from automicro.loggers.tensorboard import TensorBoardLogger

__all__ = [
    "CSVLogger",
    "ConsoleLogger",
    "JSONLinesLogger",
    "Logger",
    "LoggerGroup",
    "TensorBoardLogger",
]
