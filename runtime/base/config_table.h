// One table binds configuration keys to struct fields. The same table parses TOML files and
// --set overrides, names the nearest known key for an unknown one, checks types, prints --help,
// and writes the resolved configuration back as TOML. Each component describes its own struct:
//
//   void describe(ConfigTable& table, OptimizerConfig& c) {
//     table.add("optimizer.lr", &c.lr, "peak learning rate; 3e-4 suits models below 1B");
//   }
//
// Ranges and relations are not checked here but in each component's validate(). Not thread safe.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "runtime/base/status.h"

namespace kintsugi {

class ConfigTable {
 public:
  using Field = std::variant<bool*, int64_t*, double*, std::string*, std::vector<int64_t>*, std::vector<std::string>*>;
  // One {key = value, ...} of an array of tables, values as TOML scalars.
  using Scalar = std::variant<bool, int64_t, double, std::string>;
  using Row = std::map<std::string, Scalar>;

  // Binds `path` ("training.steps") to `field`, which must outlive the table and holds the default.
  // `allowed`: for strings, the accepted values; empty means any.
  void add(std::string path, Field field, std::string doc, std::vector<std::string> allowed = {});
  // Binds an array of inline tables, e.g. fault.kill = [{rank = 3, step = 40}]. `keys`: allowed row keys.
  void add_rows(std::string path, std::vector<Row>* rows, std::vector<std::string> keys, std::string doc);

  // kInvalidArgument with file, line, key, value and what is allowed; kNotFound when there is no such file.
  Status load_file(const std::string& path);
  // `origin` names the text in messages.
  Status load_text(std::string_view text, const std::string& origin);
  // "training.steps=100"; the value is TOML, or a bare word taken as a string.
  Status set(std::string_view assignment);

  // True when a file or --set gave the key.
  bool was_set(std::string_view path) const;
  // The values now, as TOML that load_text() accepts: sections in order of registration.
  std::string to_toml() const;
  // One line a key: name, default (the value now), doc, allowed values.
  std::string help() const;
  // The known key with the least edit distance; empty when none is near.
  std::string nearest(std::string_view path) const;

 private:
  struct Entry {
    std::string path;
    Field field;
    std::vector<Row>* rows = nullptr;
    std::vector<std::string> row_keys;
    std::string doc;
    std::vector<std::string> allowed;
    bool set = false;
  };
  struct Loader;
  Entry* find(std::string_view path);
  Status unknown_key(const std::string& where, std::string_view path) const;
  std::vector<Entry> entries_;
};

}  // namespace kintsugi
