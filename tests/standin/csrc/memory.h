// The device's memory: a caching allocator with the rules of torch's native one for CUDA.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>

#include "streams.h"

namespace standin {

c10::DeviceAllocator& device_allocator();
c10::Allocator& pinned_allocator();

bool is_pinned(const void* data);
// The pinned block is given away again only after that place.
void use_pinned(const void* data, const Place& place);

// What the device has in all, and what others than torch hold of it.
void set_capacity(int device, int64_t bytes);
void set_occupied(int device, int64_t bytes);
int64_t capacity(int device);
double memory_fraction(int device);
void set_memory_fraction(int device, double fraction);

}  // namespace standin
