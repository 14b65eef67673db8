// Reads and writes between files, or other processes, and the memory of tensors. Here and not in Rust, because no reference to the
// bytes may exist there: libtorch and other tensors see the same memory.
#include "common.h"
#include <algorithm>
#include <cerrno>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

using namespace te;

namespace {

// The most that one call to the kernel moves. Where several threads read and write, disks take a quarter longer for requests
// of 8 MiB than for these; in memory it makes no difference.
constexpr size_t MOST_BYTES = size_t(2) << 20;

template <typename Transfer> int32_t transfer_all(size_t size, Transfer &&transfer) {
  for (size_t done = 0; done < size;) {
    const ssize_t moved = transfer(done, std::min(MOST_BYTES, size - done));
    if (moved > 0)
      done += size_t(moved);
    else if (moved == 0)
      return -1;
    else if (errno != EINTR)
      return errno;
  }
  return 0;
}

// The bytes of a tensor, which is `changed` by what follows or only read; 0, or -2.
int32_t memory_of(void *handle, bool changed, char *&bytes, size_t &size) noexcept {
  try {
    const at::Tensor &t = tensor(handle);
    if (!t.defined() || !t.device().is_cpu() || !t.is_contiguous())
      return -2;
    bytes = static_cast<char *>(changed ? t.mutable_data_ptr() : const_cast<void *>(t.const_data_ptr()));
    size = t.nbytes();
    return bytes == nullptr && size > 0 ? -2 : 0;
  } catch (...) {
    return -2;
  }
}

// Moves all bytes of a tensor; `transfer` gets the address of some of them, how many went before, and how many there are.
template <typename Transfer> int32_t move_bytes(void *handle, bool changed, Transfer &&transfer) noexcept {
  char *bytes = nullptr;
  size_t size = 0;
  if (memory_of(handle, changed, bytes, size) != 0)
    return -2;
  return transfer_all(size, [&](size_t done, size_t count) { return transfer(bytes + done, done, count); });
}

} // namespace

// These return 0, the number of an error of the system, -1 at the end of the file, or -2 for a tensor whose memory is not
// in one piece on the CPU. At the end of a file nothing is written either.
extern "C" {
int32_t te_read_at(void *handle, int32_t file, int64_t offset) noexcept {
  return move_bytes(handle, true, [&](char *bytes, size_t done, size_t count) {
    return pread(file, bytes, count, off_t(offset + int64_t(done)));
  });
}
int32_t te_write_at(void *handle, int32_t file, int64_t offset) noexcept {
  return move_bytes(handle, false, [&](const char *bytes, size_t done, size_t count) {
    return pwrite(file, bytes, count, off_t(offset + int64_t(done)));
  });
}
int32_t te_read_process(void *handle, int32_t process, size_t address) noexcept {
  return move_bytes(handle, true, [&](char *bytes, size_t done, size_t count) {
    iovec here{bytes, count};
    iovec there{reinterpret_cast<void *>(address + done), count};
    return process_vm_readv(process, &here, 1, &there, 1, 0);
  });
}
// Where a process may only be read by its ancestors unless it says otherwise (Yama), its siblings may from now on.
int32_t te_let_siblings_read() noexcept {
#ifdef PR_SET_PTRACER
  return prctl(PR_SET_PTRACER, static_cast<unsigned long>(getppid()), 0, 0, 0) == 0 ? 0 : errno;
#else
  return ENOSYS;
#endif
}
// The address of the first byte, and how many there are.
int32_t te_memory(void *handle, bool changed, uint8_t **address, size_t *size) noexcept {
  char *bytes = nullptr;
  const int32_t status = memory_of(handle, changed, bytes, *size);
  *address = reinterpret_cast<uint8_t *>(bytes);
  return status;
}
}
