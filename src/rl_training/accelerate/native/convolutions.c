/* Convolutions without padding of channels-last images, and their gradients, with the order of summation of the library
   that computes them when nothing is compiled. */

#include "kernels.h"

typedef struct {
    long images, height, width, channels; /* x [images, height, width, channels] */
    long outputs, size, stride; /* weight [outputs, channels, size, size], y [images, down, across, outputs] */
    const float* x;
    const unsigned char* bytes; /* instead of x: x is bytes * scale */
    int in_planes;              /* whether each image of `bytes` is four planes, one after the other */
    float scale;
    const float* weight;
    const float* bias;
    const float* gradient; /* of y */
    const float* mask;     /* gradient of x: zero where the mask is not positive; or null */
    float* out;            /* y, or the gradient of x, or of the weight */
    float* out_bias;       /* the gradient of the bias */
    float* memory;         /* size of the weight, times `parts` for its gradient, plus one image per thread */
    int relu;              /* forward: whether to apply a relu */
    long chunk;            /* forward: number of products that are summed sequentially; then chunk sums are added */
    long parts;            /* gradient of the weight: number of parts of the batch that are summed separately */
    int by_rows;           /* gradient of the weight: whether rows of an image are summed separately */
    int last_row_first;    /* gradient of x: whether sums over the kernel's rows are in reverse order */
    int last_column_first; /* gradient of x: whether sums over the kernel's columns are in reverse order */
} convolution_type;

INLINE long smaller(long a, long b) { return a < b ? a : b; }
INLINE long down_of(const convolution_type* g) { return (g->height - g->size) / g->stride + 1; }
INLINE long size_of(const convolution_type* g) { return g->height * g->width * g->channels; }
INLINE long across_of(const convolution_type* g) { return (g->width - g->size) / g->stride + 1; }

/* An image of x; a uint8 image is first converted into the thread's part of `memory`, from offset `after` on. */
static const float* image_of(const convolution_type* g, long i, long after, long t) {
    if (!g->bytes) return g->x + i * size_of(g);
    float* const to = g->memory + after + t * size_of(g);
    const unsigned char* from = g->bytes + i * size_of(g);
    const long size = g->height * g->width;
    if (!g->in_planes)
        for (long l = 0; l < size_of(g); l++) to[l] = (float)from[l] * g->scale;
    else for (long start = 0; start < size; start += MANY)
        some_pixels(from + start, size, smaller(MANY, size - start), g->scale, to + 4 * start);
    return to;
}

/* Run `call` with a constant number of vectors, for all columns `j` up to `n`. */
#define BY_PANELS(n, call)                                                                                           \
    for (long j = 0; j < (n);) {                                                                                     \
        if ((n) - j >= PANEL) { enum { vectors = VECTORS }; call; j += PANEL; }                                      \
        else { enum { vectors = VECTORS / 2 }; call; j += PANEL / 2; }                                               \
    }

/* ------------------------------------------------------------------------------------------------------------------
   Forward
   ------------------------------------------------------------------------------------------------------------------ */

/* Reorder a thread's share of the weight to [size, size, channels, outputs]. */
static void turn_weight(const convolution_type* g, float* out, long t, long all) {
    const long taps = g->size * g->size, columns = g->channels * taps, fours = g->outputs / 4;
    for (long o = 4 * (fours * t / all); o < 4 * (fours * (t + 1) / all); o += 4) {
        const float* from = g->weight + o * columns;
        long q = 0;
        for (; q + 4 <= columns; q += 4) {
            float block[16];
            transpose(from + q, columns, block, 4);
            for (long l = 0; l < 4; l++)
                memcpy(out + (((q + l) % taps) * g->channels + (q + l) / taps) * g->outputs + o, block + 4 * l, 16);
        }
        for (; q < columns; q++)
            for (long l = 0; l < 4; l++)
                out[((q % taps) * g->channels + q / taps) * g->outputs + o + l] = from[l * columns + q];
    }
}

/* Some pixels of y: sums over the kernel window, line by line. */
INLINE void forward_tile(const convolution_type* g, const float* x, float* out, long first, const int rows,
                         const int vectors, long j) {
    const long down = down_of(g), across = across_of(g), line = g->size * g->channels, all = g->size * line;
    const long step = g->width * g->channels, outputs = g->outputs;
    const float* at[2 * ROWS];
    vec total[2 * ROWS][VECTORS];
    long image = first / (down * across), row = first / across % down, column = first % across;
    for (int r = 0; r < rows; r++) {
        at[r] = x + ((image * g->height + row * g->stride) * g->width + column * g->stride) * g->channels;
        if (++column == across) column = 0, row++;
        if (row == down) row = 0, image++;
        for (int v = 0; v < vectors; v++) total[r][v] = *(const vec*)(g->bias + j + v * LANES);
    }
    for (long start = 0; start < all; start += g->chunk) {
        const long end = smaller(start + g->chunk, all);
        vec sum[2 * ROWS][VECTORS];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] = (vec){0};
        for (long q = start; q < end;) {
            const long under = q / line, stop = smaller(end, (under + 1) * line), shift = under * (step - line);
            const float* b = g->memory + q * outputs + j;
            for (; q < stop; q++, b += outputs) {
                vec right[VECTORS];
                for (int v = 0; v < vectors; v++) right[v] = *(const vec*)(b + v * LANES);
                for (int r = 0; r < rows; r++) {
                    vec left = (vec){0} + at[r][shift + q];
                    for (int v = 0; v < vectors; v++) sum[r][v] = FMA(left, right[v], sum[r][v]);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) total[r][v] += sum[r][v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            if (g->relu) total[r][v] = (vec)((bits)total[r][v] & ~(total[r][v] < 0.0f));
            *(vec*)(out + (first + r) * outputs + j + v * LANES) = total[r][v];
        }
}

/* Pixels [low, high); the last tile overlaps others, whose results are the same. */
static void forward_tiles(const convolution_type* g, const float* x, float* out, long low, long high) {
    const int rows = g->outputs % PANEL ? 2 * ROWS : ROWS;
    for (long i = low; i < high; i += rows) {
        const long first = i + rows <= high ? i : high > rows ? high - rows : 0;
        if (rows == ROWS) for (long j = 0; j < g->outputs; j += PANEL) forward_tile(g, x, out, first, ROWS, VECTORS, j);
        else for (long j = 0; j < g->outputs; j += PANEL / 2) forward_tile(g, x, out, first, 2 * ROWS, VECTORS / 2, j);
    }
}

void convolution(const convolution_type* g, int threads) {
    const long pixels = down_of(g) * across_of(g), count = g->images * pixels;
    const long weight = g->size * g->size * g->channels * g->outputs;
#pragma omp parallel num_threads(threads)
    {
        const long t = omp_get_thread_num(), all = omp_get_num_threads();
        const long low = count * t / all, high = count * (t + 1) / all;
        turn_weight(g, g->memory, t, all);
#pragma omp barrier
        if (!g->bytes) forward_tiles(g, g->x, g->out, low, high);
        else for (long i = low / pixels; i * pixels < high; i++) { /* image by image */
            const long begin = low > i * pixels ? low - i * pixels : 0, end = smaller(pixels, high - i * pixels);
            forward_tiles(g, image_of(g, i, weight, t), g->out + i * pixels * g->outputs, begin, end);
        }
    }
}

/* ------------------------------------------------------------------------------------------------------------------
   Gradient of the weight
   ------------------------------------------------------------------------------------------------------------------ */

/* Add the contribution of an image to some rows of the gradient [size, size, channels, outputs]. */
INLINE void weight_tile(const convolution_type* g, const float* x, long image, long k, const int rows,
                        const int vectors, const int by_rows, long j, float* out, int is_first) {
    const long down = down_of(g), across = across_of(g), line = g->size * g->channels, outputs = g->outputs;
    const long step = g->stride * g->channels;
    x += k / line * g->width * g->channels + k % line;
    const float* y = g->gradient + image * down * across * outputs + j;
    vec total[6][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++)
            total[r][v] = is_first ? (vec){0} : *(const vec*)(out + (k + r) * outputs + j + v * LANES);
    for (long i = 0; i < down; i++, x += g->stride * g->width * g->channels) {
        vec sum[6][VECTORS];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] = by_rows ? (vec){0} : total[r][v];
        for (long l = 0; l < across; l++, y += outputs) {
            vec right[VECTORS];
            for (int v = 0; v < vectors; v++) right[v] = *(const vec*)(y + v * LANES);
            for (int r = 0; r < rows; r++) {
                vec left = (vec){0} + x[l * step + r];
                for (int v = 0; v < vectors; v++) sum[r][v] = FMA(left, right[v], sum[r][v]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) total[r][v] = by_rows ? (vec)(total[r][v] + sum[r][v]) : sum[r][v];
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) *(vec*)(out + (k + r) * outputs + j + v * LANES) = total[r][v];
}

/* The gradient of the bias: the sequential sum over all pixels. */
INLINE void bias_tile(const convolution_type* g, const int vectors, long j) {
    const long pixels = g->images * down_of(g) * across_of(g);
    vec sum[VECTORS];
    for (int v = 0; v < vectors; v++) sum[v] = (vec){0};
    for (long p = 0; p < pixels; p++)
        for (int v = 0; v < vectors; v++) sum[v] += *(const vec*)(g->gradient + p * g->outputs + j + v * LANES);
    for (int v = 0; v < vectors; v++) *(vec*)(g->out_bias + j + v * LANES) = sum[v];
}

#define WEIGHT_TILE(rows) BY_PANELS(g->outputs, weight_tile(g, x, i, k, rows, vectors, 0, j, out, i == begin))
#define HALF_TILE(rows)                                                                                              \
    for (long j = 0; j < g->outputs; j += PANEL / 2) weight_tile(g, x, i, k, rows, VECTORS / 2, 1, j, out, i == begin);

void convolution_to_weight(const convolution_type* g, int threads) {
    const long line = g->size * g->channels, lines = g->size, size = lines * line * g->outputs;
    const long taps = g->size * g->size;
    const long many = 6, tiles = (line + many - 1) / many; /* tiles per line, of about equal size */
#pragma omp parallel num_threads(threads)
    {
        const long t = omp_get_thread_num(), all = omp_get_num_threads();
        /* each thread processes its parts of the batch, or its share of the kernel */
        const int by_parts = g->parts % all == 0;
        const long count = lines * tiles;
        const long low = by_parts ? 0 : count * t / all, high = by_parts ? count : count * (t + 1) / all;
        const long first = by_parts ? g->parts * t / all : 0, last = by_parts ? g->parts * (t + 1) / all : g->parts;
        for (long part = first; part < last; part++) {
            const long begin = g->images * part / g->parts, end = g->images * (part + 1) / g->parts;
            float* out = g->memory + part * size;
            for (long i = begin; i < end; i++) {
                const float* x = image_of(g, i, g->parts * size, t);
                for (long n = low; n < high; n++) {
                    long k = n / tiles * line + line * (n % tiles) / tiles;
                    const long after = n / tiles * line + line * (n % tiles + 1) / tiles, rows = after - k;
                    if (g->by_rows && rows == 6) { HALF_TILE(6) }
                    else if (g->by_rows) for (; k < after; k++) { HALF_TILE(1) }
                    else if (rows == 6) { WEIGHT_TILE(6) }
                    else if (rows == 5) { WEIGHT_TILE(5) }
                    else for (; k < after; k++) { WEIGHT_TILE(1) }
                }
            }
        }
        if (t == all - 1) { BY_PANELS(g->outputs, bias_tile(g, vectors, j)) }
#pragma omp barrier
        for (long o = g->outputs * t / all; o < g->outputs * (t + 1) / all; o++)
            for (long c = 0; c < g->channels; c++)
                for (long s = 0; s < taps; s++) {
                    const float* from = g->memory + (s * g->channels + c) * g->outputs + o;
                    float total = from[0];
                    for (long part = 1; part < g->parts; part++) total += from[part * size];
                    g->out[(o * g->channels + c) * taps + s] = total;
                }
    }
}

/* ------------------------------------------------------------------------------------------------------------------
   Gradient of x
   ------------------------------------------------------------------------------------------------------------------ */

/* Pixels of a row of x, `stride` apart, that one column of the kernel reaches: a sum over the kernel's rows. */
INLINE void x_tile(const convolution_type* g, const float* weight, long image, long row, long column, long first,
                   const int rows, long j) {
    enum { vectors = VECTORS / 2 };
    const long down = down_of(g), across = across_of(g), outputs = g->outputs, channels = g->channels;
    vec sum[10][vectors];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = (vec){0};
    for (long m = 0; m < g->size; m++) {
        const long line = g->last_row_first ? g->size - 1 - m : m, from = row - line;
        if (from < 0 || from % g->stride || from / g->stride >= down) continue;
        const float* a = g->gradient + ((image * down + from / g->stride) * across + first) * outputs;
        const float* b = weight + (line * g->size + column) * outputs * channels + j;
        for (long o = 0; o < outputs; o++, b += channels) {
            vec right[VECTORS];
            for (int v = 0; v < vectors; v++) right[v] = *(const vec*)(b + v * LANES);
            for (int r = 0; r < rows; r++) {
                vec left = (vec){0} + a[r * outputs + o];
                for (int v = 0; v < vectors; v++) sum[r][v] = FMA(left, right[v], sum[r][v]);
            }
        }
    }
    float* out = g->out + ((image * g->height + row) * g->width + column + first * g->stride) * channels + j;
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) *(vec*)(out + r * g->stride * channels + v * LANES) += sum[r][v];
}

#define X_TILE(rows) for (long j = 0; j < channels; j += PANEL / 2) x_tile(g, weight, i, row, column, first, rows, j);

void convolution_to_x(const convolution_type* g, int threads) {
    const long taps = g->size * g->size, across = across_of(g), outputs = g->outputs, channels = g->channels;
    const long many = 10, tiles = (across + many - 1) / many, length = g->width * channels;
    float* const weight = g->memory; /* [size, size, outputs, channels] */
#pragma omp parallel num_threads(threads)
    {
        const long t = omp_get_thread_num(), all = omp_get_num_threads();
        for (long o = outputs * t / all; o < outputs * (t + 1) / all; o++)
            for (long s = 0; s < taps; s++)
                for (long c = 0; c < channels; c++)
                    weight[(s * outputs + o) * channels + c] = g->weight[(o * channels + c) * taps + s];
#pragma omp barrier
        const long count = g->images * g->height;
        for (long n = count * t / all; n < count * (t + 1) / all; n++) {
            const long i = n / g->height, row = n % g->height;
            float* out = g->out + n * length;
            memset(out, 0, length * sizeof(float));
            for (long m = 0; m < g->size; m++) {
                const long column = g->last_column_first ? g->size - 1 - m : m;
                for (long l = 0; l < tiles; l++) {
                    long first = across * l / tiles;
                    const long after = across * (l + 1) / tiles, rows = after - first;
                    if (rows == 10) { X_TILE(10) }
                    else if (rows == 9) { X_TILE(9) }
                    else if (rows == 8) { X_TILE(8) }
                    else if (rows == 7) { X_TILE(7) }
                    else if (rows == 6) { X_TILE(6) }
                    else if (rows == 5) { X_TILE(5) }
                    else for (; first < after; first++) { X_TILE(1) }
                }
            }
            if (g->mask) { /* gradient of the relu of the previous layer */
                const float* mask = g->mask + n * length;
                for (long l = 0; l < length; l++) out[l] = mask[l] <= 0.0f ? 0.0f : out[l];
            }
        }
    }
}
