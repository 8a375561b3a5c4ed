// Recurrent cells: torch asks a device of this kind for fused ones. These are made of its operators.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace standin {
namespace {

using at::Tensor;

Tensor with_bias(const Tensor& gates, const std::optional<Tensor>& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

Tensor bias_gradient(const Tensor& gates, bool has_bias) {
  return has_bias ? gates.sum(0) : Tensor();
}

Tensor through_sigmoid(const Tensor& gradient, const Tensor& out) {
  return gradient * out * (1 - out);
}

Tensor through_tanh(const Tensor& gradient, const Tensor& out) {
  return gradient * (1 - out * out);
}

std::tuple<Tensor, Tensor> gru(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
  const Tensor update = (from_input[1] + from_hidden[1]).sigmoid();
  const Tensor fresh = (from_input[2] + reset * from_hidden[2]).tanh();
  const Tensor next = fresh + update * (hidden - fresh);
  return {next, at::cat({reset, update, fresh, hidden, from_hidden[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(
    const Tensor& gradient, const Tensor& kept, bool has_bias) {
  const auto parts = kept.chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &hidden = parts[3];
  const Tensor to_fresh = through_tanh(gradient * (1 - update), fresh);
  const Tensor to_update = through_sigmoid(gradient * (hidden - fresh), update);
  const Tensor to_reset = through_sigmoid(to_fresh * parts[4], reset);
  const Tensor to_input = at::cat({to_reset, to_update, to_fresh}, 1);
  const Tensor to_hidden = at::cat({to_reset, to_update, to_fresh * reset}, 1);
  return {
      to_input, to_hidden, gradient * update, bias_gradient(to_input, has_bias),
      bias_gradient(to_hidden, has_bias)};
}

std::tuple<Tensor, Tensor, Tensor> lstm(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  const Tensor sum = with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias);
  const auto gates = sum.chunk(4, 1);
  const Tensor in = gates[0].sigmoid();
  const Tensor forget = gates[1].sigmoid();
  const Tensor fresh = gates[2].tanh();
  const Tensor out = gates[3].sigmoid();
  const Tensor next = forget * cell + in * fresh;
  return {out * next.tanh(), next, at::cat({in, forget, fresh, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_backward(
    const std::optional<Tensor>& of_hidden, const std::optional<Tensor>& of_cell,
    const Tensor& cell, const Tensor& next, const Tensor& kept, bool has_bias) {
  const auto gates = kept.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &fresh = gates[2], &out = gates[3];
  const Tensor shown = next.tanh();
  const Tensor hidden = of_hidden && of_hidden->defined() ? *of_hidden : at::zeros_like(next);
  Tensor to_cell = through_tanh(hidden * out, shown);
  if (of_cell && of_cell->defined()) {
    to_cell = to_cell + *of_cell;
  }
  const Tensor to_gates = at::cat(
      {through_sigmoid(to_cell * fresh, in), through_sigmoid(to_cell * cell, forget),
       through_tanh(to_cell * in, fresh), through_sigmoid(hidden * shown, out)},
      1);
  return {to_gates, to_cell * forget, bias_gradient(to_gates, has_bias)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_thnn_fused_gru_cell", &gru);
  m.impl("_thnn_fused_gru_cell_backward", &gru_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_backward);
}

}  // namespace
}  // namespace standin
