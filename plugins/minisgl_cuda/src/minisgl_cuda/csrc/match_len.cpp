// The length of the common prefix of two token sequences, on the host.
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t BLOCK = 64;  // tokens per comparison of memory

struct MatchArgs {
    const int32_t* a;
    const int32_t* b;
    int64_t length;
};

}  // namespace

extern "C" int64_t minisgl_match_len(const MatchArgs* args) {
    const int32_t* a = args->a;
    const int32_t* b = args->b;
    int64_t i = 0;
    while (i + BLOCK <= args->length && std::memcmp(a + i, b + i, BLOCK * sizeof(int32_t)) == 0) i += BLOCK;
    while (i < args->length && a[i] == b[i]) ++i;
    return i;
}
