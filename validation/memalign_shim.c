/* Loaded before the C library: notes the buffers that XLA's CPU client takes between shim_start
 * and shim_stop. They are those of posix_memalign with an alignment of 64 (tsl::port::AlignedMalloc
 * with xla::cpu::MinAlign). Libraries inside kernels take page-aligned scratch the same way, and
 * C++ its own objects with aligned_alloc; neither is a buffer. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { kRoom = 1 << 16, kBufferAlignment = 64 };
static int64_t sizes[kRoom];
static int64_t count;
static int noting;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void note(size_t size) {
  pthread_mutex_lock(&mutex);
  if (noting && count < kRoom) sizes[count++] = (int64_t)size;
  pthread_mutex_unlock(&mutex);
}

int posix_memalign(void **address, size_t alignment, size_t size) {
  static int (*real)(void **, size_t, size_t);
  if (!real) real = (int (*)(void **, size_t, size_t))dlsym(RTLD_NEXT, "posix_memalign");
  if (alignment == kBufferAlignment) note(size);
  return real(address, alignment, size);
}

void shim_start(void) {
  pthread_mutex_lock(&mutex);
  count = 0;
  noting = 1;
  pthread_mutex_unlock(&mutex);
}

int64_t shim_stop(int64_t *out) {
  pthread_mutex_lock(&mutex);
  noting = 0;
  for (int64_t i = 0; i < count; ++i) out[i] = sizes[i];
  pthread_mutex_unlock(&mutex);
  return count;
}
