// Writes the tables of tables.h as the host computes them: tables <folder>
#include "tables.h"

template <class Table>
std::vector<uint32_t> jnvfp4::tables::filled() {
  std::vector<uint32_t> entries(Table::size);
  for (uint32_t i = 0; i < Table::size; ++i) entries[i] = Table::entry(i);
  return entries;
}

int main(int argc, char** argv) { return jnvfp4::tables::write_all(argc, argv); }
