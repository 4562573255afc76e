// Writes the tables of tables.h as the host computes them: tables <folder>
#include "tables.h"

namespace {
struct Fill {
  template <class Table>
  std::vector<uint32_t> operator()() const {
    std::vector<uint32_t> entries(Table::size);
    for (uint32_t i = 0; i < Table::size; ++i) entries[i] = Table::entry(i);
    return entries;
  }
};
}  // namespace

int main(int argc, char** argv) { return jnvfp4::tables::write_all(argc, argv, Fill{}); }
