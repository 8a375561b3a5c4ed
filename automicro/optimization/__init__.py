"""From gradient to parameters: unscale, clip, step, each once, with memory for it held back."""

from automicro.optimization.clipping import clip_gradients
from automicro.optimization.prediction import predict_step_memory
from automicro.optimization.reservation import OptimizerReservation
from automicro.optimization.scaling import GradientScaler
from automicro.optimization.step import step_optimizer

__all__ = [
    "GradientScaler",
    "OptimizerReservation",
    "clip_gradients",
    "predict_step_memory",
    "step_optimizer",
]
