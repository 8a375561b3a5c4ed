#pragma once

#include <ATen/core/Generator.h>

#include <optional>

namespace standin {

// The generator of the CPU that a generator of the device draws from; the default one's unless given.
at::Generator numbers_of(const std::optional<at::Generator>& generator, int device);

const at::Generator& default_generator(int device);

}  // namespace standin
