// The owned objects behind the opaque handles of stores, process groups and work.
#pragma once
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace te {
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

inline StorePtr &store(void *handle) { return *static_cast<StorePtr *>(handle); }
inline GroupPtr &group(void *handle) { return *static_cast<GroupPtr *>(handle); }
inline WorkPtr &work(void *handle) { return *static_cast<WorkPtr *>(handle); }
} // namespace te
