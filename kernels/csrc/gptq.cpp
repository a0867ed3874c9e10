// GPTQ's kernels as functions of C. The caller has checked what it gives.
#include "gptq.h"

#include "export.h"

using namespace quantkit;

QUANTKIT_EXPORT void quantkit_search_scales(int64_t inputs, int64_t outputs, int64_t size, int64_t levels,
                                            int64_t table_count, const float* table_values, const float* table_bounds,
                                            const float* weight, const float* importance, const float* coarse,
                                            int64_t coarse_count, const float* fine, int64_t fine_count,
                                            int64_t scale_type, void* scale, uint8_t* zero, int threads) {
  const Table table{table_count, table_values, table_bounds};
  const CodeGrid grid{inputs, outputs, size, levels, table, !zero, static_cast<FloatType>(scale_type)};
  search_scales(grid, weight, importance, {coarse, coarse + coarse_count}, {fine, fine + fine_count}, threads, scale,
                zero);
}

QUANTKIT_EXPORT void quantkit_round_in_turn(int64_t inputs, int64_t outputs, int64_t size, int64_t levels,
                                            int64_t table_count, const float* table_values, const float* table_bounds,
                                            int64_t count, const float* start, const float* wanted,
                                            const float* ratios, const int64_t* columns, const float* scale,
                                            const float* zero, float* codes, float* errors, int threads) {
  const Table table{table_count, table_values, table_bounds};
  const CodeGrid grid{inputs, outputs, size, levels, table, !zero, FloatType::f32};
  round_in_turn(grid, {count, start, ratios, columns, scale, zero, codes, errors}, wanted, threads);
}

QUANTKIT_EXPORT void quantkit_improve_in_turn(int64_t inputs, int64_t outputs, int64_t size, int64_t levels,
                                              int64_t table_count, const float* table_values,
                                              const float* table_bounds, int64_t count, const float* start,
                                              const float* inverse, const float* ratios, const int64_t* columns,
                                              const float* scale, const float* zero, float* codes, float* errors,
                                              int threads) {
  const Table table{table_count, table_values, table_bounds};
  const CodeGrid grid{inputs, outputs, size, levels, table, !zero, FloatType::f32};
  improve_in_turn(grid, {count, start, ratios, columns, scale, zero, codes, errors}, inverse, threads);
}
