/* Building blocks of compiled recordings, apart from elementwise loops.

   Every sum uses the order of the library that computes it when nothing is compiled, so that results are
   bit-identical. Compiled without contraction: multiplication and addition are fused only where fma is written. */

#include <float.h>
#include <math.h>
#include <string.h>
#include <time.h>

/* ------------------------------------------------------------------------------------------------------------------
   Vectors: as wide as the machine supports, and as many as fit into its registers
   ------------------------------------------------------------------------------------------------------------------ */

#if !defined(__has_builtin)
#define __has_builtin(name) 0
#endif
#if defined(__AVX512F__)
#define LANES 16
#define VECTORS 4
typedef float machine __attribute__((vector_size(64), may_alias));
#if __has_builtin(__builtin_ia32_vfmaddps512_mask) && __has_builtin(__builtin_ia32_sqrtps512_mask)
/* what the intrinsics expand to; reading immintrin.h takes longer than compiling a recording */
#define FMA(a, b, c) ((vec)__builtin_ia32_vfmaddps512_mask((machine)(a), (machine)(b), (machine)(c), -1, 4))
#define ROOT(a) ((vec)__builtin_ia32_sqrtps512_mask((machine)(a), (machine)(a), -1, 4))
#define WRITE_PAST_CACHES(to, a) __builtin_ia32_movntps512(to, (machine)(a))
#define FENCE() __builtin_ia32_sfence()
#else
#include <immintrin.h>
#define FMA(a, b, c) ((vec)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define ROOT(a) ((vec)_mm512_sqrt_ps((__m512)(a)))
#define WRITE_PAST_CACHES(to, a) _mm512_stream_ps(to, (__m512)(a))
#define FENCE() _mm_sfence()
#endif
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#define VECTORS 2
typedef float machine __attribute__((vector_size(32), may_alias));
#if __has_builtin(__builtin_ia32_vfmaddps256) && __has_builtin(__builtin_ia32_sqrtps256)
#define FMA(a, b, c) ((vec)__builtin_ia32_vfmaddps256((machine)(a), (machine)(b), (machine)(c)))
#define ROOT(a) ((vec)__builtin_ia32_sqrtps256((machine)(a)))
#define WRITE_PAST_CACHES(to, a) __builtin_ia32_movntps256(to, (machine)(a))
#define FENCE() __builtin_ia32_sfence()
#else
#include <immintrin.h>
#define FMA(a, b, c) ((vec)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define ROOT(a) ((vec)_mm256_sqrt_ps((__m256)(a)))
#define WRITE_PAST_CACHES(to, a) _mm256_stream_ps(to, (__m256)(a))
#define FENCE() _mm_sfence()
#endif
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define LANES 4
#define VECTORS 4
typedef float32x4_t machine;
#define FMA(a, b, c) ((vec)vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b)))
#define ROOT(a) ((vec)vsqrtq_f32((float32x4_t)(a)))
#define WRITE_PAST_CACHES(to, a) (*(vec*)(to) = (a)) /* no intrinsic for it */
#define FENCE()
#else
#error "no vectors with fused products and sums"
#endif

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define PANEL (LANES * VECTORS)
#define PANEL_STEP(width) ((width) <= LANES ? LANES : (width) <= PANEL / 2 ? PANEL / 2 : PANEL) /* between packed rows */
#define INLINE static inline __attribute__((always_inline))

/* ------------------------------------------------------------------------------------------------------------------
   Shared by products and convolutions
   ------------------------------------------------------------------------------------------------------------------ */

#if defined(_OPENMP)
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

/* ------------------------------------------------------------------------------------------------------------------
   One thread or several: where other processes are busy, threads that wait for each other can be slower than one
   ------------------------------------------------------------------------------------------------------------------ */

#define TRIAL 16         /* calls that are timed, half of them by one thread */
#define TRIAL_EVERY 1024 /* calls from one trial to the next */

typedef struct {
    long calls;
    int is_alone; /* what the last trial found to be faster */
    double begin, seconds[2];
} team_type;

static double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + 1e-9 * now.tv_nsec;
}

/* Whether one thread should do the work of all in this call. Results do not depend on it. */
static int begin_call(team_type* team) {
    const long turn = team->calls % TRIAL_EVERY;
    if (turn >= TRIAL) return team->is_alone;
    if (turn == 0) team->seconds[0] = team->seconds[1] = 0;
    team->begin = seconds_now();
    return turn % 2;
}

static void end_call(team_type* team) {
    const long turn = team->calls++ % TRIAL_EVERY;
    if (turn >= TRIAL) return;
    team->seconds[turn % 2] += seconds_now() - team->begin;
    if (turn == TRIAL - 1) team->is_alone = team->seconds[1] < team->seconds[0];
}

#define BLOCK 16 /* rows and columns of a block for transposing */
#define AHEAD 8 /* rows of B to prefetch ahead */
#define ROWS 6 /* rows of the result that are kept in registers */
#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (order){__VA_ARGS__})
#endif

/* Transpose a 4 x 4 matrix. */
INLINE void transpose(const float* from, long from_row, float* to, long to_row) {
    typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
    typedef int order __attribute__((vector_size(16)));
    four a = *(const four*)from, b = *(const four*)(from + from_row);
    four c = *(const four*)(from + 2 * from_row), d = *(const four*)(from + 3 * from_row);
    four ab = SHUFFLE(a, b, 0, 4, 1, 5), cd = SHUFFLE(c, d, 0, 4, 1, 5);
    *(four*)to = SHUFFLE(ab, cd, 0, 1, 4, 5);
    *(four*)(to + to_row) = SHUFFLE(ab, cd, 2, 3, 6, 7);
    ab = SHUFFLE(a, b, 2, 6, 3, 7), cd = SHUFFLE(c, d, 2, 6, 3, 7);
    *(four*)(to + 2 * to_row) = SHUFFLE(ab, cd, 0, 1, 4, 5);
    *(four*)(to + 3 * to_row) = SHUFFLE(ab, cd, 2, 3, 6, 7);
}

enum { MANY = 1024 };
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define PIXEL(a, b, c, d) ((unsigned int)(a) | (unsigned int)(b) << 8 | (unsigned int)(c) << 16 | (unsigned int)(d) << 24)
#else
#define PIXEL(a, b, c, d) ((unsigned int)(d) | (unsigned int)(c) << 8 | (unsigned int)(b) << 16 | (unsigned int)(a) << 24)
#endif

/* Convert part of a uint8 image, four planes that are `size` apart, to channels-last floats. */
INLINE void some_pixels(const unsigned char* from, long size, long length, float scale, float* to) {
    unsigned char together[4 * MANY];
    for (long l = 0; l < length; l++) {
        unsigned int four = PIXEL(from[l], from[size + l], from[2 * size + l], from[3 * size + l]);
        memcpy(together + 4 * l, &four, 4);
    }
    for (long l = 0; l < 4 * length; l++) to[l] = (float)together[l] * scale;
}

/* ------------------------------------------------------------------------------------------------------------------
   Products: kernels.c is compiled once, recordings get the addresses of its functions
   ------------------------------------------------------------------------------------------------------------------ */

typedef struct {
    long m, n, k;         /* C [m, n] = A [m, k] B [k, n], then the operations below */
    const float* a;       /* an element of A is a[row * a_row + column * a_column], and so on */
    long a_row, a_column;
    const float* b;
    long b_row, b_column;
    const float* packed;  /* B packed by panels of PANEL columns, or null */
    float* c;
    long c_row;
    const float* bias;    /* a row that is added to each row, or null */
    const float* column;  /* a column that is added to each column, or null */
    int relu;             /* whether to apply a relu */
    const float* mask;    /* the result is zero where the mask is not positive; or null */
    long mask_row;
    long chunk;           /* number of products that are summed sequentially; then the chunk sums are added */
} product_type;
typedef void (*product_function)(const product_type*);
typedef void (*product_of_some_function)(const product_type*, float* memory, long* some);
typedef void (*pack_function)(const float* b, long row, long column, long k, long n, float* out, long first, long last);

/* ------------------------------------------------------------------------------------------------------------------
   Sums
   ------------------------------------------------------------------------------------------------------------------ */

/* Column sums in torch's order: levels of partial sums. */
enum { SOME = 256 };
static void sum_some_rows(const float* x, long rows, long step, long columns, int power, float* out) {
    float level[4][SOME];
    memset(level, 0, sizeof(level));
    long size = 1L << power, i = 0;
    while (i + size <= rows) {
        for (long j = 0; j < size; j++, i++)
            for (long c = 0; c < columns; c++) level[0][c] += x[i * step + c];
        for (int j = 1; j < 4; j++) {
            for (long c = 0; c < columns; c++) { level[j][c] += level[j - 1][c]; level[j - 1][c] = 0; }
            if (i & ((size - 1) << (j * power))) break;
        }
    }
    for (; i < rows; i++)
        for (long c = 0; c < columns; c++) level[0][c] += x[i * step + c];
    for (long c = 0; c < columns; c++) out[c] = ((level[0][c] + level[1][c]) + level[2][c]) + level[3][c];
}

static void sum_rows(const float* x, long rows, long step, long columns, int power, float* out) {
    for (long c = 0; c < columns; c += SOME)
        sum_some_rows(x + c, rows, step, columns - c < SOME ? columns - c : SOME, power, out + c);
}

/* Sum of contiguous elements in torch's order: vectors of eight, with four accumulators. */
static float sum_lanes(const float* x, long n) {
    float part[4][8];
    memset(part, 0, sizeof(part));
    long eights = n / 8, fours = eights / 4;
    for (long i = 0; i < fours; i++)
        for (int k = 0; k < 4; k++)
            for (int l = 0; l < 8; l++) part[k][l] += x[(4 * i + k) * 8 + l];
    for (long i = 4 * fours; i < eights; i++)
        for (int l = 0; l < 8; l++) part[0][l] += x[i * 8 + l];
    for (int k = 1; k < 4; k++)
        for (int l = 0; l < 8; l++) part[0][l] += part[k][l];
    float total = 0;
    for (long i = eights * 8; i < n; i++) total += x[i];
    for (int l = 0; l < 8; l++) total += part[0][l];
    return total;
}

/* Sum of contiguous elements in numpy's order: pairwise summation. */
static float sum_pairs(const float* x, long n) {
    if (n < 8) {
        float total = 0;
        for (long i = 0; i < n; i++) total += x[i];
        return total;
    }
    if (n <= 128) {
        float r[8];
        long i = 8;
        for (int j = 0; j < 8; j++) r[j] = x[j];
        for (; i < n - n % 8; i += 8)
            for (int j = 0; j < 8; j++) r[j] += x[i + j];
        float total = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
        for (; i < n; i++) total += x[i];
        return total;
    }
    long half = n / 2;
    half -= half % 8;
    return sum_pairs(x, half) + sum_pairs(x + half, n - half);
}

/* ------------------------------------------------------------------------------------------------------------------
   Operations on all weights of a network
   ------------------------------------------------------------------------------------------------------------------ */

/* Store a vector; if `is_shared`, bypass the caches (`to` must then be aligned). A cache line that another core has
   read must first be invalidated there, one by one; if cores share no cache, that takes several times as long as
   writing it to memory and reading it again. */
INLINE void put(float* to, vec value, int is_shared) {
    if (is_shared) WRITE_PAST_CACHES(to, value);
    else *(vec*)to = value;
}

/* A step of Adam for weights [low, high), in whole vectors. */
static void adam(float* restrict weights, const float* restrict gradient, float* restrict average,
                 float* restrict square, long low, long high, double rate, double step, double beta1, double beta2,
                 double eps, int is_shared) {
    const float size = -(rate / (1 - pow(beta1, step))), root = sqrt(1 - pow(beta2, step));
    const float a = 1 - beta1, b = 1 - beta2, kept = beta2, small = eps;
    const vec share = (vec){0} + a;
    for (long i = low; i < high; i += LANES) {
        const vec g = *(const vec*)(gradient + i), before = *(const vec*)(average + i);
        const vec mean = FMA(share, g - before, before), power = FMA(b * g, g, *(const vec*)(square + i) * kept);
        *(vec*)(average + i) = mean;
        *(vec*)(square + i) = power;
        put(weights + i, *(const vec*)(weights + i) + size * mean / (ROOT(power) / root + small), is_shared);
    }
    if (is_shared) FENCE();
}

/* Target network update: target += share * (source - target). */
static void follow(float* restrict target, const float* restrict source, long low, long high, float share,
                   int is_shared) {
    long i = low;
    for (; i + LANES <= high; i += LANES) {
        const vec before = *(const vec*)(target + i);
        put(target + i, FMA((vec){0} + share, *(const vec*)(source + i) - before, before), is_shared);
    }
    for (; i < high; i++) target[i] = fmaf(share, source[i] - target[i], target[i]);
    if (is_shared) FENCE();
}

/* Add squares to eight partial sums, in torch's order: eight elements at a time. */
static void add_squares(const float* x, long n, float* sums) {
    typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
    eight part = *(eight*)sums;
    for (long i = 0; i + 8 <= n; i += 8) part += *(const eight*)(x + i) * *(const eight*)(x + i);
    *(eight*)sums = part;
}

/* The norm of `n` elements, from the partial sums of all whole vectors of eight. */
static float norm_from(const float* sums, const float* x, long n) {
    float total = sums[0];
    for (int l = 1; l < 8; l++) total += sums[l];
    for (long i = n / 8 * 8; i < n; i++) total += x[i] * x[i];
    return sqrtf(total);
}

/* The maximum and minimum of two numbers; NaN if either is NaN. */
INLINE float largest(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }
INLINE float least(float a, float b) { return a != a ? a : b != b ? b : a < b ? a : b; }

/* ------------------------------------------------------------------------------------------------------------------
   Functions of other libraries
   ------------------------------------------------------------------------------------------------------------------ */

typedef float (*sdot_function)(long n, const float* x, long x_step, const float* y, long y_step);
typedef void (*sgemv_function)(int order, int turned, long m, long n, float alpha, const float* a, long a_row,
                               const float* x, long x_step, float beta, float* y, long y_step);
typedef void (*sgemm_function)(int order, int a_turned, int b_turned, long m, long n, long k, float alpha, const float* a,
                               long a_row, const float* b, long b_row, float beta, float* c, long c_row);
typedef void (*loop_function)(char** places, const long* count, const long* steps, void* data);

/* Apply a ufunc loop of numpy to each element. */
INLINE void apply(loop_function function, void* data, const float* x, float* y, long count) {
    char* places[] = {(char*)x, (char*)y};
    const long steps[] = {sizeof(float), sizeof(float)};
    function(places, &count, steps, data);
}

typedef machine (*vector_function)(machine);

/* `yes` where bits are set, else `no`. */
INLINE vec choose(bits which, vec yes, vec no) { return (vec)(((bits)yes & which) | ((bits)no & ~which)); }

/* log(1 + exp(x)) of whole vectors, and its gradient, with torch's operations. */
INLINE void softplus(vector_function exp, vector_function log1p, const float* x, float* y, long n) {
    for (long i = 0; i < n; i += LANES) {
        const vec v = *(const vec*)(x + i), soft = (vec)log1p(exp((machine)v));
        *(vec*)(y + i) = choose(v > 20.0f, v, soft);
    }
}

INLINE void softplus_backward(vector_function exp, const float* gradient, const float* x, float* y, long n) {
    for (long i = 0; i < n; i += LANES) {
        const vec v = *(const vec*)(x + i), g = *(const vec*)(gradient + i), e = (vec)exp((machine)v);
        *(vec*)(y + i) = choose(v > 20.0f, g, g * e / (e + 1.0f));
    }
}
