// Results of unknown number: each is given to a Rust function that appends it to a Rust vector.
#pragma once
#include "common.h"

namespace te {
using PushTensor = void (*)(void *list, void *tensor);
using PushNamed = void (*)(void *list, const char *name, size_t length, void *tensor, bool is_buffer);
using PushText = void (*)(void *list, const char *key, size_t key_length, const char *value, size_t value_length);
} // namespace te
