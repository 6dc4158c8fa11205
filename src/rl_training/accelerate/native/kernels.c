/* Matrix products, with the order of summation of the library that computes them when nothing is compiled; pixels. */

#include "kernels.h"

/* Pack panels [first, last) of B [k, n], of PANEL columns each; the last panel is padded with zeros. */
static void pack_panels(const float* b, long row, long column, long k, long n, float* out, long first, long last) {
    for (long p = first; p < last; p++) {
        float* to = out + p * k * PANEL;
        long width = n - p * PANEL < PANEL ? n - p * PANEL : PANEL, step = PANEL_STEP(width);
        const float* from = b + p * PANEL * column;
        if (width < step) memset(to, 0, k * step * sizeof(float));
        if (column == 1) {
            for (long q = 0; q < k; q++) memcpy(to + q * step, from + q * row, width * sizeof(float));
            continue;
        }
        long j = 0;
        if (row == 1) { /* whole blocks first, so that cache lines are written at once */
            const long whole = k / BLOCK * BLOCK;
            for (; j + BLOCK <= width; j += BLOCK) {
                for (long q = 0; q < whole; q += BLOCK)
                    for (long l = 0; l < BLOCK * BLOCK; l += 4 * BLOCK)
                        for (long i = 0; i < BLOCK; i += 4)
                            transpose(from + q + l / BLOCK + (j + i) * column, column,
                                      to + (q + l / BLOCK) * step + j + i, step);
                for (long q = whole; q < k; q++)
                    for (long l = j; l < j + BLOCK; l++) to[q * step + l] = from[q + l * column];
            }
        }
        for (; j < width; j++)
            for (long q = 0; q < k; q++) to[q * step + j] = from[q * row + j * column];
    }
}

/* Sum the products of some rows of A and a panel of B over [begin, end), sequentially, with prefetching of rows of B. A
   macro, because in a function compilers do not keep all sums in registers. */
#define SUM(begin, end)                                                                                              \
    for (int r = 0; r < rows; r++)                                                                                   \
        for (int v = 0; v < vectors; v++) sum[r][v] = (vec){0};                                                      \
    for (long q = begin; q < end; q++) {                                                                             \
        vec right[VECTORS];                                                                                          \
        for (int v = 0; v < vectors; v++) right[v] = *(const vec*)(b + q * b_row + v * LANES);                       \
        for (int v = 0; v < vectors; v++) __builtin_prefetch(b + (q + AHEAD) * b_row + v * LANES);                   \
        for (int r = 0; r < rows; r++) {                                                                             \
            vec left = (vec){0} + a[r * x->a_row + q * x->a_column];                                                 \
            for (int v = 0; v < vectors; v++) sum[r][v] = FMA(left, right[v], sum[r][v]);                            \
        }                                                                                                            \
    }

/* Apply relu and mask to one row of a panel, and store it. */
INLINE void finish(const product_type* x, long i, const int vectors, const int is_whole, long j, vec* total) {
    float* c = x->c + i * x->c_row + j;
    const float* mask = x->mask + i * x->mask_row + j;
    if (x->relu)
        for (int v = 0; v < vectors; v++) total[v] = (vec)((bits)total[v] & ~(total[v] < 0.0f));
    if (is_whole) {
        if (x->mask)
            for (int v = 0; v < vectors; v++) total[v] = (vec)((bits)total[v] & ~(*(const vec*)(mask + v * LANES) <= 0.0f));
        for (int v = 0; v < vectors; v++) *(vec*)(c + v * LANES) = total[v];
    } else {
        float row[PANEL];
        long width = x->n - j < vectors * LANES ? x->n - j : vectors * LANES;
        for (int v = 0; v < vectors; v++) *(vec*)(row + v * LANES) = total[v];
        for (long l = 0; l < width; l++) c[l] = x->mask && mask[l] <= 0.0f ? 0.0f : row[l];
    }
}

/* The initial value of sums: the bias. */
INLINE vec start_of(const product_type* x, long i, vec bias) {
    if (x->column) bias = (vec){0} + x->column[i];
    return bias;
}

/* Compute `rows` rows from row `i` of a panel, or of its first vectors; `is_whole` if all of its columns are used.
   `some` are the row indices in C, if not all rows are computed. */
INLINE void tile(const product_type* x, const long* some, long i, const int rows, const int vectors, const int is_whole,
                 const float* b, long b_row, long j, const vec* bias) {
    const float* a = x->a + i * x->a_row;
    for (int r = 0; !some && r < rows; r++) /* prefetch the destination */
        for (int v = 0; v < vectors; v++) __builtin_prefetch(x->c + (i + r) * x->c_row + j + v * LANES, 1);
    if (is_whole && x->chunk >= x->k) {
        vec sum[2 * ROWS][VECTORS];
        SUM(0, x->k)
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) { /* directly from registers: storing dominates the time if k is small */
            vec total[VECTORS];
            for (int v = 0; v < vectors; v++) total[v] = start_of(x, i + r, bias[v]) + sum[r][v];
            finish(x, some ? some[i + r] : i + r, vectors, 1, j, total);
        }
        return;
    }
    vec total[2 * ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) total[r][v] = start_of(x, i + r, bias[v]);
    for (long start = 0; start < x->k; start += x->chunk) {
        vec sum[2 * ROWS][VECTORS];
        SUM(start, (start + x->chunk < x->k ? start + x->chunk : x->k))
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) total[r][v] += sum[r][v];
    }
    for (int r = 0; r < rows; r++) finish(x, some ? some[i + r] : i + r, vectors, is_whole, j, total[r]);
}

/* Two rows of a whole panel: the remainder after the full tiles. */
static __attribute__((noinline)) void two_rows(const product_type* x, const long* some, long i, const float* b, long b_row,
                                               long j, const vec* bias) {
    tile(x, some, i, 2, VECTORS, 1, b, b_row, j, bias);
}

INLINE void tiles(const product_type* x, const long* some, const int rows, const int vectors, const int is_whole,
                  const float* b, long b_row, long j) {
    vec bias[VECTORS];
    memset(bias, 0, sizeof(bias));
    if (x->bias) memcpy(bias, x->bias + j, (x->n - j < vectors * LANES ? x->n - j : vectors * LANES) * sizeof(float));
    const long left = x->m % rows, num_pairs = is_whole && rows == ROWS && left < ROWS - 1 ? (left + 1) / 2 : 0;
    for (long i = 0; i < x->m - 2 * num_pairs; i += rows) /* the last tile overlaps rows that were computed before */
        tile(x, some, i + rows <= x->m ? i : x->m - rows, rows, vectors, is_whole, b, b_row, j, bias);
    for (long i = 0; i < num_pairs; i++) two_rows(x, some, x->m - 2 * (i + 1), b, b_row, j, bias);
}

INLINE void some_panels(const product_type* x, const long* some) {
    for (long j = 0; j < x->n; j += PANEL) {
        const float* b = x->packed ? x->packed + j * x->k : x->b + j;
        long width = x->n - j < PANEL ? x->n - j : PANEL;
        long b_row = x->packed ? PANEL_STEP(width) : x->b_row;
        if (x->m < ROWS && x->m > 1 && width == PANEL) tiles(x, some, 2, VECTORS, 1, b, b_row, j);
        else if (x->m < ROWS)
            for (long l = 0; l < width; l += LANES) tiles(x, some, 1, 1, 0, b + l, b_row, j + l);
        else if (width == PANEL) tiles(x, some, ROWS, VECTORS, 1, b, b_row, j);
        else if (width > PANEL / 2) tiles(x, some, ROWS, VECTORS, 0, b, b_row, j);
        else if (width == PANEL / 2 && x->m >= 2 * ROWS) tiles(x, some, 2 * ROWS, VECTORS / 2, 1, b, b_row, j);
        else if (width > LANES) tiles(x, some, ROWS, VECTORS / 2, 0, b, b_row, j);
        else tiles(x, some, ROWS, 1, 0, b, b_row, j);
    }
}

static __attribute__((noinline)) void panels(const product_type* x) { some_panels(x, 0); }

void pack(const float* b, long row, long column, long k, long n, float* out, long first, long last) {
    pack_panels(b, row, column, k, n, out, first, last);
}

void product(const product_type* x) { panels(x); }

/* Whether all of B is finite: zero times infinity or NaN would not be zero. */
static int is_finite(const product_type* x) {
    const int by_rows = x->b_column == 1;
    const long count = by_rows ? x->k : x->n, step = by_rows ? x->b_row : x->b_column, length = by_rows ? x->n : x->k;
    int found = 1;
    for (long i = 0; i < count; i++)
        for (long j = 0; j < length; j++) found &= fabsf(x->b[i * step + j]) <= FLT_MAX;
    return found;
}

/* Whether all numbers are zero, of either sign. */
static int are_zeros(const float* x, long n) {
    bits found = {0};
    long i = 0;
    for (; i + LANES <= n; i += LANES) found |= *(const bits*)(x + i) << 1;
    int any = 0;
    for (int l = 0; l < LANES; l++) any |= found[l];
    for (; i < n; i++) any |= x[i] != 0.0f;
    return !any;
}

/* `product` for many zero rows in A: the other rows are first copied to `memory`, and their indices to `some`. */
void product_of_some(const product_type* x, float* memory, long* some) {
    product_type y = *x;
    if (!is_finite(x)) {
        panels(x);
        return;
    }
    y.m = 0;
    for (long i = 0; i < x->m; i++) {
        const float* a = x->a + i * x->a_row;
        if (are_zeros(a, x->k)) memset(x->c + i * x->c_row, 0, x->n * sizeof(float));
        else {
            memcpy(memory + y.m * x->k, a, x->k * sizeof(float));
            some[y.m++] = i;
        }
    }
    y.a = memory;
    y.a_row = x->k;
    some_panels(&y, some);
}

/* `product` with several threads; `memory` is for packing B, or null if that is not needed. */
void product_by_threads(const product_type* x, float* memory, int threads) {
    const long parts = (x->n + PANEL - 1) / PANEL;
    const int by_rows = x->m >= x->n || parts < threads;
#pragma omp parallel num_threads(threads)
    {
        const long t = omp_get_thread_num(), all = omp_get_num_threads();
        product_type y = *x;
        if (memory) {
            pack_panels(x->b, x->b_row, x->b_column, x->k, x->n, memory, parts * t / all, parts * (t + 1) / all);
            y.packed = memory;
#pragma omp barrier
        }
        const long count = by_rows ? x->m : parts, low = count * t / all, high = count * (t + 1) / all;
        if (by_rows) {
            y.m = high - low;
            y.a += low * x->a_row;
            y.c += low * x->c_row;
            if (x->column) y.column += low;
            if (x->mask) y.mask += low * x->mask_row;
        } else {
            y.n = (high * PANEL < x->n ? high * PANEL : x->n) - low * PANEL;
            y.b += low * PANEL * x->b_column;
            if (memory) y.packed += low * PANEL * x->k;
            y.c += low * PANEL;
            if (x->bias) y.bias += low * PANEL;
            if (x->mask) y.mask += low * PANEL;
        }
        if (high > low) panels(&y);
    }
}

/* Elements from row `i` and column `j` on of a product whose matrices are both contiguous along k: each has one partial
   sum per vector lane, which are reduced by adding halves; the remaining products are added last. */
typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
#define DOTS(name, vector)                                                                                           \
    INLINE void name(const product_type* x, long i, long j, const int rows, const int columns) {                     \
        enum { SUMS = sizeof(vector) / sizeof(float) };                                                              \
        const float *a = x->a + i * x->a_row, *b = x->b + j * x->b_column;                                           \
        const long whole = x->k / SUMS * SUMS, row = x->a_row, column = x->b_column;                                 \
        vector sum[4][4];                                                                                            \
        for (int r = 0; r < rows; r++)                                                                               \
            for (int c = 0; c < columns; c++) sum[r][c] = (vector){0};                                               \
        for (long q = 0; q < whole; q += SUMS)                                                                       \
            for (int r = 0; r < rows; r++)                                                                           \
                for (int c = 0; c < columns; c++)                                                                    \
                    sum[r][c] += *(const vector*)(a + r * row + q) * *(const vector*)(b + c * column + q);           \
        for (int r = 0; r < rows; r++)                                                                               \
            for (int c = 0; c < columns; c++) {                                                                      \
                float part[SUMS];                                                                                    \
                *(vector*)part = sum[r][c];                                                                          \
                for (int half = SUMS / 2; half > 0; half /= 2)                                                       \
                    for (int l = 0; l < half; l++) part[l] += part[l + half];                                        \
                for (long q = whole; q < x->k; q++) part[0] += a[r * row + q] * b[c * column + q];                   \
                x->c[(i + r) * x->c_row + j + c] = (x->bias ? x->bias[j + c] : 0.0f) + part[0];                      \
            }                                                                                                        \
    }
DOTS(dots_by_fours, four)
DOTS(dots_by_eights, eight)

/* `product` for few columns: blocks of four columns use four partial sums per element, the remaining columns eight. */
void product_of_few(const product_type* x) {
    for (long i = 0; i < x->m;) {
        const int many = i + 4 <= x->m;
        long j = 0;
        for (; j + 4 <= x->n; j += 4) {
            if (many) dots_by_fours(x, i, j, 4, 4);
            else dots_by_fours(x, i, j, 1, 4);
        }
        for (; j < x->n; j++) {
            if (many) dots_by_eights(x, i, j, 4, 1);
            else dots_by_eights(x, i, j, 1, 1);
        }
        i += many ? 4 : 1;
    }
}

/* A x + bias for one vector x [k]; k is a multiple of four, and x is aligned to 16 bytes. The first four products are
   summed sequentially; the others go into four partial sums, the first of which continues from there. */
void product_of_vector(const float* a, long m, long k, const float* x, const float* bias, float* y, int threads) {
    typedef float four __attribute__((vector_size(16), aligned(4), may_alias));
    enum { SOME_ROWS = 8 }; /* rows at once; m is a multiple of it */
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long i = 0; i < m; i += SOME_ROWS) {
        four sum[SOME_ROWS];
        for (int r = 0; r < SOME_ROWS; r++) {
            const float* row = a + (i + r) * k;
            sum[r] = (four){((row[0] * x[0] + row[1] * x[1]) + row[2] * x[2]) + row[3] * x[3]};
        }
        for (long q = 4; q < k; q += 4)
            for (int r = 0; r < SOME_ROWS; r++) sum[r] += *(const four*)(a + (i + r) * k + q) * *(const four*)(x + q);
        for (int r = 0; r < SOME_ROWS; r++)
            y[i + r] = ((sum[r][0] + sum[r][2]) + (sum[r][1] + sum[r][3])) + bias[i + r];
    }
}

void adam_step(float* w, const float* g, float* m, float* v, long low, long high, double rate, double step, double beta1,
               double beta2, double eps) {
    adam(w, g, m, v, low, high, rate, step, beta1, beta2, eps, 0);
}

void follow_by(float* target, const float* source, long low, long high, float share) {
    follow(target, source, low, high, share, 0);
}

float norm(const float* x, long n) {
    float sums[8] = {0};
    add_squares(x, n, sums);
    return norm_from(sums, x, n);
}

void softplus_by(vector_function exp, vector_function log1p, const float* x, float* y, long n) {
    softplus(exp, log1p, x, y, n);
}

void softplus_backward_by(vector_function exp, const float* gradient, const float* x, float* y, long n) {
    softplus_backward(exp, gradient, x, y, n);
}

int panel_columns(void) { return PANEL; }

int lanes(void) { return LANES; }

/* ------------------------------------------------------------------------------------------------------------------
   Pixels
   ------------------------------------------------------------------------------------------------------------------ */

/* Images [count, 4, size] to floats [count, size, 4]. */
void pixels_to_floats(const unsigned char* x, long count, long size, float scale, float* out, int threads) {
#pragma omp parallel for num_threads(threads) collapse(2) schedule(static)
    for (long i = 0; i < count; i++)
        for (long start = 0; start < size; start += MANY)
            some_pixels(x + i * 4 * size + start, size, size - start < MANY ? size - start : MANY, scale,
                        out + (i * size + start) * 4);
}
