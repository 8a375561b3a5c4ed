#pragma once

#include <ATen/core/Tensor.h>

namespace standin {

// A tensor of the CPU on the memory of one of the device.
at::Tensor on_host(const at::Tensor& tensor);

}  // namespace standin
