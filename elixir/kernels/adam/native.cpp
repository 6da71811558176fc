// One Adam step in one pass over memory: in place, or into other memory, which leaves the old states as they are.
//
// Ordinary stores would read every line of what is only written before they overwrite it, so such lines go past the
// caches. Each operator rounds as it is written (-ffp-contract=off), so results have the bits of the eager step.
//
// One combination is compiled at a time: GRADIENT, MOMENTS and WEIGHTS, each one of the kinds below. With float32 moments
// the arithmetic is that of torch's fused kernel, where CONTRACTED says that torch was compiled so that a product and a
// sum may round once. With others it is that of `adam_rule`.

#include <cmath>
#include <cstdint>
#include <cstring>

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "there is no kernel for this processor"
#endif
#include <immintrin.h>

namespace {

enum Kind { NONE = 0, EIGHT = 1, BFLOAT16 = 2, FLOAT16 = 3, FLOAT32 = 4 };

constexpr bool TORCHS = MOMENTS == FLOAT32;
constexpr int64_t BLOCK = 256;                // of 8-bit moments
constexpr int64_t ROW = TORCHS ? 32 : BLOCK;  // elements of a round: whole cache lines of every kind
constexpr float TINY = 1e-30f;                // a scale below it counts as zero

struct Numbers {
    float factor;         // of the gradient
    float sign;           // -1 to ascend; the rule's factor has it already
    float l2, decay;      // weight decay of either kind
    float avg_weight;     // 1 - beta1
    float beta2, sq_weight;
    float root;           // the rule multiplies by it, torch divides by it
    float eps, step_size;
};

struct States {
    const void *gradient, *master, *avg, *sq;
    void *new_master, *new_avg, *new_sq, *weights;
    const float *avg_scale, *sq_scale;
    float *new_avg_scale, *new_sq_scale;
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
using Floats = __m512;
using Ints = __m512i;
constexpr int WIDTH = 16;
inline Floats all(float value) { return _mm512_set1_ps(value); }
inline Floats root_of(Floats x) { return _mm512_sqrt_ps(x); }
inline Floats magnitude(Floats x) { return _mm512_abs_ps(x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats load(const float* from) { return _mm512_loadu_ps(from); }
inline Floats widen_bfloat16(const uint16_t* from) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}
inline Floats widen_float16(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline Ints bits_of(Floats x) { return _mm512_castps_si512(x); }
inline Floats from_bits(Ints x) { return _mm512_castsi512_ps(x); }
inline Ints all_bits(uint32_t value) { return _mm512_set1_epi32(int(value)); }
inline Ints places() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
inline Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints multiply(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Ints both(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline Ints either_not_both(Ints a, Ints b) { return _mm512_xor_si512(a, b); }
template <int by> inline Ints right(Ints a) { return _mm512_srli_epi32(a, by); }
inline Ints where_equal(Ints a, Ints b, Ints then, Ints otherwise) {
    return _mm512_mask_mov_epi32(otherwise, _mm512_cmpeq_epi32_mask(a, b), then);
}
inline Ints where_nan(Floats x, Ints then, Ints otherwise) {
    return _mm512_mask_mov_epi32(otherwise, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), then);
}
template <bool streams> inline void store(float* to, Floats x) {
    streams ? _mm512_stream_ps(to, x) : _mm512_storeu_ps(to, x);
}
template <bool streams> inline void store_low_halves(uint16_t* to, Ints x) {
    const __m256i halves = _mm512_cvtepi32_epi16(x);
    streams ? _mm256_stream_si256(reinterpret_cast<__m256i*>(to), halves)
            : _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
template <bool streams> inline void store_float16(uint16_t* to, Floats x) {
    const __m256i halves = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    streams ? _mm256_stream_si256(reinterpret_cast<__m256i*>(to), halves)
            : _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
#else
using Floats = __m256;
using Ints = __m256i;
constexpr int WIDTH = 8;
inline Floats all(float value) { return _mm256_set1_ps(value); }
inline Floats root_of(Floats x) { return _mm256_sqrt_ps(x); }
inline Floats magnitude(Floats x) { return _mm256_andnot_ps(all(-0.0f), x); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats load(const float* from) { return _mm256_loadu_ps(from); }
inline Floats widen_bfloat16(const uint16_t* from) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}
inline Floats widen_float16(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Ints bits_of(Floats x) { return _mm256_castps_si256(x); }
inline Floats from_bits(Ints x) { return _mm256_castsi256_ps(x); }
inline Ints all_bits(uint32_t value) { return _mm256_set1_epi32(int(value)); }
inline Ints places() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
inline Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints multiply(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline Ints both(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline Ints either_not_both(Ints a, Ints b) { return _mm256_xor_si256(a, b); }
template <int by> inline Ints right(Ints a) { return _mm256_srli_epi32(a, by); }
inline Ints where_equal(Ints a, Ints b, Ints then, Ints otherwise) {
    return _mm256_blendv_epi8(otherwise, then, _mm256_cmpeq_epi32(a, b));
}
inline Ints where_nan(Floats x, Ints then, Ints otherwise) {
    return _mm256_blendv_epi8(otherwise, then, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
}
template <bool streams> inline void store(float* to, Floats x) {
    streams ? _mm256_stream_ps(to, x) : _mm256_storeu_ps(to, x);
}
template <bool streams> inline void store_halves(uint16_t* to, __m128i halves) {
    streams ? _mm_stream_si128(reinterpret_cast<__m128i*>(to), halves)
            : _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}
template <bool streams> inline void store_low_halves(uint16_t* to, Ints x) {
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(x, x), 0x08);
    store_halves<streams>(to, _mm256_castsi256_si128(packed));
}
template <bool streams> inline void store_float16(uint16_t* to, Floats x) {
    store_halves<streams>(to, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#endif

template <Kind kind> inline Floats read(const void* from, int64_t at) {
    if constexpr (kind == FLOAT32) return load(static_cast<const float*>(from) + at);
    if constexpr (kind == BFLOAT16) return widen_bfloat16(static_cast<const uint16_t*>(from) + at);
    return widen_float16(static_cast<const uint16_t*>(from) + at);
}

template <Kind kind, bool streams> inline void write(void* to, int64_t at, Floats x) {
    if constexpr (kind == FLOAT32) {
        store<streams>(static_cast<float*>(to) + at, x);
    } else if constexpr (kind == BFLOAT16) {  // to the nearest, ties to even
        const Ints bits = bits_of(x);
        const Ints odd = both(right<16>(bits), all_bits(1));
        const Ints rounded = right<16>(add(add(bits, all_bits(0x7fff)), odd));
        store_low_halves<streams>(static_cast<uint16_t*>(to) + at, where_nan(x, all_bits(0xffff), rounded));
    } else if constexpr (kind == FLOAT16) {
        store_float16<streams>(static_cast<uint16_t*>(to) + at, x);
    }
}

// Rounds up with the probability that makes the mean exact; random bits of `elixir.kernels.adam.moments._noise`.
inline Floats rounded_at_random(Floats x, uint32_t place, uint32_t seed) {
    Ints noise = add(places(), all_bits(place));
    noise = add(multiply(noise, all_bits(0x9E3779B1u)), all_bits(seed));
    noise = multiply(either_not_both(noise, right<16>(noise)), all_bits(0x85EBCA6Bu));
    noise = multiply(either_not_both(noise, right<13>(noise)), all_bits(0xC2B2AE35u));
    noise = either_not_both(noise, right<16>(noise));
    const Ints bits = bits_of(x), exponent = all_bits(0x7f800000u);
    const Ints up = both(add(bits, both(noise, all_bits(0xffff))), all_bits(0xffff0000u));
    return from_bits(where_equal(both(bits, exponent), exponent, bits, up));
}

// The same random bits, for loops that the compiler turns into vectors.
inline uint32_t noise_at(uint32_t place, uint32_t seed) {
    uint32_t noise = place * 0x9E3779B1u + seed;
    noise = (noise ^ (noise >> 16)) * 0x85EBCA6Bu;
    noise = (noise ^ (noise >> 13)) * 0xC2B2AE35u;
    return noise ^ (noise >> 16);
}

// New moments; `g` has been multiplied by the factor.
inline void average(Floats g, Floats master, Floats& avg, Floats& sq, const Numbers& n) {
    if constexpr (TORCHS) {
        g = g * all(n.sign);
        if (n.l2 != 0) g = CONTRACTED ? fma(master, all(n.l2), g) : g + master * all(n.l2);
        const Floats old = sq * all(n.beta2), more = all(n.sq_weight) * g;
        sq = CONTRACTED ? fma(more, g, old) : old + more * g;
        const bool near = n.avg_weight < 0.5f && n.avg_weight > -0.5f;
        avg = fma(all(near ? n.avg_weight : n.avg_weight - 1), g - avg, near ? avg : g);
    } else {
        g = g + master * all(n.l2);
        avg = avg + (g - avg) * all(n.avg_weight);
        sq = sq * all(n.beta2) + g * (g * all(n.sq_weight));
    }
}

inline Floats move(Floats master, Floats avg, Floats root, const Numbers& n) {
    if constexpr (TORCHS) {
        const Floats denominator = root / all(n.root) + all(n.eps);
        return master * all(n.decay) + all(-n.step_size) * avg / denominator;
    }
    const Floats denominator = root * all(n.root) + all(n.eps);
    return master * all(n.decay) - (avg * all(n.step_size)) / denominator;
}

template <bool has_sign> constexpr float LARGEST = has_sign ? 127 : 255;

template <bool has_sign> inline float power(float share) {  // the fourth, or the eighth
    const float square = share * share, fourth = square * square;
    return has_sign ? fourth : fourth * fourth;
}

template <bool has_sign, typename Code> void decode(const Code* codes, float scale, float* values) {
    for (int64_t i = 0; i < BLOCK; ++i) {
        const float share = float(codes[i]) * (1.0f / LARGEST<has_sign>);
        values[i] = (has_sign ? share * share * (share * std::fabs(share)) : power<false>(share)) * scale;
    }
}

// Codes of a block's values, and their scale.
template <bool has_sign, typename Code>
float encode(const float* values, Code* codes, uint32_t place, uint32_t seed) {
    constexpr float MAX = LARGEST<has_sign>;
    alignas(64) float share[BLOCK], root[BLOCK];
    int32_t largest = 0;  // as bits, so that one that is no number is the largest
    for (int64_t i = 0; i < BLOCK; ++i) {
        int32_t bits;
        std::memcpy(&bits, values + i, sizeof bits);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float scale;
    std::memcpy(&scale, &largest, sizeof scale);
    const Floats inverse = all(1.0f / (scale < TINY ? TINY : scale));
    for (int64_t i = 0; i < BLOCK; i += WIDTH) {
        const Floats of_largest = magnitude(load(values + i)) * inverse, fourth = root_of(root_of(of_largest));
        store<false>(share + i, of_largest);
        store<false>(root + i, (has_sign ? fourth : root_of(fourth)) * all(MAX));
    }
    for (int64_t i = 0; i < BLOCK; ++i) {
        const uint32_t bits = noise_at(place + uint32_t(i), seed);
        const float noise = float(int32_t(has_sign ? bits & 0xffff : bits >> 16)) * 0x1p-16f;
        const float whole = std::floor(root[i]), below = whole > MAX - 1 ? MAX - 1 : whole;
        const float lower = power<has_sign>(below * (1.0f / MAX)), upper = power<has_sign>((below + 1) * (1.0f / MAX));
        const float code = below + (noise * (upper - lower) < share[i] - lower ? 1.0f : 0.0f);
        if (has_sign) codes[i] = Code(int32_t(values[i] < 0 ? -code : code));
        else codes[i] = Code(int32_t(values[i] > 0 && code < 1 ? 1.0f : code));
    }
    return scale;
}

template <bool streams, bool streams_weights>
inline void step_row(const States& s, int64_t row, const Numbers& n, uint32_t place, uint32_t seed) {
    alignas(64) float avgs[BLOCK], sqs[BLOCK];  // of 8-bit moments
    const int64_t block = row / BLOCK;
    if constexpr (MOMENTS == EIGHT) {
        decode<true>(static_cast<const int8_t*>(s.avg) + row, s.avg_scale[block], avgs);
        decode<false>(static_cast<const uint8_t*>(s.sq) + row, s.sq_scale[block], sqs);
    }
    for (int64_t i = 0; i < ROW; i += WIDTH) {
        const int64_t at = row + i;
        const Floats master = read<FLOAT32>(s.master, at), g = read<GRADIENT>(s.gradient, at) * all(n.factor);
        Floats avg = MOMENTS == EIGHT ? load(avgs + i) : read<MOMENTS>(s.avg, at);
        Floats sq = MOMENTS == EIGHT ? load(sqs + i) : read<MOMENTS>(s.sq, at);
        average(g, master, avg, sq, n);
        const Floats moved = move(master, avg, root_of(sq), n);
        write<FLOAT32, streams>(s.new_master, at, moved);
        write<WEIGHTS, streams_weights>(s.weights, at, moved);
        if constexpr (MOMENTS == EIGHT) {
            store<false>(avgs + i, avg);
            store<false>(sqs + i, sq);
        } else {
            write<MOMENTS, streams>(s.new_avg, at, avg);
            write<MOMENTS, streams>(s.new_sq, at, TORCHS ? sq : rounded_at_random(sq, uint32_t(at) + place, seed));
        }
    }
    if constexpr (MOMENTS == EIGHT) {
        const uint32_t first = place + uint32_t(row);
        s.new_avg_scale[block] = encode<true>(avgs, static_cast<int8_t*>(s.new_avg) + row, first, seed);
        s.new_sq_scale[block] = encode<false>(sqs, static_cast<uint8_t*>(s.new_sq) + row, first, seed);
    }
}

template <bool streams, bool streams_weights>
void step_rows(const States& s, int64_t begin, int64_t end, const Numbers& n, uint32_t place, uint32_t seed) {
    for (int64_t row = begin; row < end; row += ROW) step_row<streams, streams_weights>(s, row, n, place, seed);
    _mm_sfence();  // a thread that is told that this is over must see what was streamed
}

constexpr int64_t size_of(Kind kind) {
    return kind == NONE ? 0 : kind == FLOAT32 ? 4 : kind == EIGHT ? 1 : 2;
}

// The last elements, fewer than a row.
void step_rest(const States& s, int64_t begin, int64_t end, const Numbers& n, uint32_t place, uint32_t seed) {
    alignas(64) char in[4][ROW * 4] = {}, out[4][ROW * 4];
    const void* from[] = {s.gradient, s.master, s.avg, s.sq};
    void* to[] = {s.new_master, s.new_avg, s.new_sq, s.weights};
    const int64_t read_size[] = {size_of(GRADIENT), 4, size_of(MOMENTS), size_of(MOMENTS)};
    const int64_t written_size[] = {4, size_of(MOMENTS), size_of(MOMENTS), size_of(WEIGHTS)};
    const int64_t count = end - begin;
    for (int i = 0; i < 4; ++i)
        std::memcpy(in[i], static_cast<const char*>(from[i]) + begin * read_size[i], count * read_size[i]);
    const States row{in[0], in[1], in[2], in[3], out[0], out[1], out[2], out[3]};
    step_rows<false, false>(row, 0, ROW, n, place + uint32_t(begin), seed);
    for (int i = 0; i < 4; ++i)
        if (written_size[i])
            std::memcpy(static_cast<char*>(to[i]) + begin * written_size[i], out[i], count * written_size[i]);
}

bool aligned(const void* first, const void* second = nullptr, const void* third = nullptr) {
    const auto bits = [](const void* one) { return reinterpret_cast<uintptr_t>(one); };
    return (bits(first) | bits(second) | bits(third)) % 64 == 0;
}

}  // namespace

// `numel` is a multiple of BLOCK with 8-bit moments.
extern "C" void elixir_adam(const States* states, const Numbers* numbers, int64_t numel, uint32_t place, uint32_t seed,
                            int threads) {
    const int64_t rows = numel / ROW, parts = threads < 1 ? 1 : threads < rows ? threads : rows;
    const States& s = *states;
    const bool apart = s.new_master != s.master && aligned(s.new_master, s.new_avg, s.new_sq);
    const auto run = !aligned(s.weights) ? step_rows<false, false>
                     : apart             ? step_rows<true, true>
                                         : step_rows<false, true>;
#pragma omp parallel for num_threads(parts > 0 ? parts : 1) schedule(static, 1)
    for (int64_t part = 0; part < parts; ++part)
        run(s, rows * part / parts * ROW, rows * (part + 1) / parts * ROW, *numbers, place, seed);
    if (rows * ROW < numel) step_rest(s, rows * ROW, numel, *numbers, place, seed);
}
