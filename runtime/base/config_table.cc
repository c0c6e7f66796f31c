#include "runtime/base/config_table.h"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include "runtime/base/file_system.h"

namespace kintsugi {
namespace {

constexpr const char* kAssignment = "--set ";

template <class... Ts>
struct Overloaded : Ts... {
  using Ts::operator()...;
};
template <class... Ts>
Overloaded(Ts...) -> Overloaded<Ts...>;

// Levenshtein distance, for "did you mean".
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

std::string quoted(std::string_view s) {
  std::ostringstream out;
  out << toml::value<std::string>(std::string(s));
  return out.str();
}

std::string number(double v) {
  std::string s = fmt::format("{}", v);  // shortest text that reads back to the same double
  if (s.find_first_of(".einf") == std::string::npos) s += ".0";
  return s;
}

std::string to_text(const ConfigTable::Scalar& v) {
  return std::visit(
      Overloaded{[](bool b) { return std::string(b ? "true" : "false"); }, [](int64_t i) { return std::to_string(i); },
                 [](double d) { return number(d); }, [](const std::string& s) { return quoted(s); }},
      v);
}

template <class T, class F>
std::string list_text(const std::vector<T>& items, F&& one) {
  std::string out = "[";
  for (const T& item : items) out += (out.size() > 1 ? ", " : "") + one(item);
  return out + "]";
}

std::string to_text(const ConfigTable::Field& f) {
  return std::visit(Overloaded{[](const bool* v) { return to_text(ConfigTable::Scalar(*v)); },
                               [](const int64_t* v) { return to_text(ConfigTable::Scalar(*v)); },
                               [](const double* v) { return to_text(ConfigTable::Scalar(*v)); },
                               [](const std::string* v) { return to_text(ConfigTable::Scalar(*v)); },
                               [](const std::vector<int64_t>* v) {
                                 return list_text(*v, [](int64_t i) { return std::to_string(i); });
                               },
                               [](const std::vector<std::string>* v) {
                                 return list_text(*v, [](const std::string& s) { return quoted(s); });
                               }},
                    f);
}

std::string rows_text(const std::vector<ConfigTable::Row>& rows) {
  return list_text(rows, [](const ConfigTable::Row& row) {
    std::string out = "{";
    for (const auto& [key, value] : row) out += (out.size() > 1 ? ", " : "") + key + " = " + to_text(value);
    return out + "}";
  });
}

const char* type_name(const ConfigTable::Field& f) {
  return std::visit(Overloaded{[](bool*) { return "true or false"; }, [](int64_t*) { return "an integer"; },
                               [](double*) { return "a number"; }, [](std::string*) { return "a string"; },
                               [](std::vector<int64_t>*) { return "an array of integers"; },
                               [](std::vector<std::string>*) { return "an array of strings"; }},
                    f);
}

bool is_toml_value(const std::string& text) {
  try {
    return toml::parse("v = " + text).size() == 1;
  } catch (const toml::parse_error&) {
    return false;
  }
}

// "run.toml:3"; an assignment of the command line has but one line.
std::string place(const std::string& origin, const toml::source_region& source) {
  return origin.starts_with(kAssignment) ? origin : fmt::format("{}:{}", origin, source.begin.line);
}

std::string node_text(const toml::node& node) {
  std::ostringstream out;
  node.visit([&](const auto& n) { out << n; });
  return out.str();
}

// What a field of any type, or an array of tables, may be given.
using Value = std::variant<bool, int64_t, double, std::string, std::vector<int64_t>, std::vector<std::string>,
                           std::vector<ConfigTable::Row>>;

template <class T>
std::optional<Value> array_of(const toml::node& node) {
  if (!node.is_array() || (!node.as_array()->empty() && !node.as_array()->is_homogeneous<T>())) return std::nullopt;
  std::vector<T> items;
  for (const toml::node& item : *node.as_array()) items.push_back(item.value<T>().value());
  return items;
}

// The node as a value of the field's type; nothing when it is of another.
std::optional<Value> value_for(const ConfigTable::Field& field, const toml::node& node) {
  const auto exactly = [&]<class T>(T) -> std::optional<Value> {
    if (const std::optional<T> value = node.value_exact<T>()) return *value;
    return std::nullopt;
  };
  return std::visit(
      Overloaded{[&](const bool*) { return exactly(bool{}); }, [&](const int64_t*) { return exactly(int64_t{}); },
                 [&](const double*) -> std::optional<Value> {
                   if (node.is_integer()) return static_cast<double>(**node.as_integer());
                   return exactly(double{});
                 },
                 [&](const std::string*) { return exactly(std::string()); },
                 [&](const std::vector<int64_t>*) { return array_of<int64_t>(node); },
                 [&](const std::vector<std::string>*) -> std::optional<Value> {
                   if (node.is_string()) return std::vector<std::string>{**node.as_string()};
                   return array_of<std::string>(node);
                 }},
      field);
}

}  // namespace

// Walks one parsed TOML document and keeps its leaves, for the fields to take once all of them are right.
struct ConfigTable::Loader {
  ConfigTable& table;
  const std::string& origin;
  std::vector<std::pair<Entry*, Value>> accepted{};

  static std::string wanted(const Entry& entry) {
    if (entry.rows == nullptr) return type_name(entry.field);
    return fmt::format("an array of tables with keys {}", fmt::join(entry.row_keys, ", "));
  }

  std::string where(const toml::node& node, const std::string& path) const {
    return fmt::format("{}: {}", place(origin, node.source()), path);
  }

  Result<std::vector<Row>> rows_of(const Entry& entry, const toml::node& node) const {
    if (!node.is_array()) return invalid_argument(where(node, entry.path) + " must be " + wanted(entry));
    std::vector<Row> rows;
    for (const toml::node& item : *node.as_array()) {
      if (!item.is_table()) return invalid_argument(where(item, entry.path) + " must be " + wanted(entry));
      Row& row = rows.emplace_back();
      for (const auto& [key, value] : *item.as_table()) {
        const std::string name(key.str());
        if (std::find(entry.row_keys.begin(), entry.row_keys.end(), name) == entry.row_keys.end()) {
          return invalid_argument(fmt::format("{}: unknown key '{}'; allowed: {}", where(value, entry.path), name,
                                              fmt::join(entry.row_keys, ", ")));
        }
        if (value.is_boolean())
          row[name] = **value.as_boolean();
        else if (value.is_integer())
          row[name] = **value.as_integer();
        else if (value.is_floating_point())
          row[name] = **value.as_floating_point();
        else if (value.is_string())
          row[name] = **value.as_string();
        else
          return invalid_argument(where(value, entry.path) + "." + name + " must be a scalar");
      }
    }
    return rows;
  }

  Result<Value> value_of(const Entry& entry, const toml::node& node) const {
    if (entry.rows != nullptr) {
      KTG_ASSIGN_OR_RETURN(std::vector<Row> rows, rows_of(entry, node));
      return Value(std::move(rows));
    }
    std::optional<Value> value = value_for(entry.field, node);
    if (!value) {
      return invalid_argument(
          fmt::format("{} = {}: must be {}", where(node, entry.path), node_text(node), wanted(entry)));
    }
    if (const auto* s = std::get_if<std::string>(&*value);
        s != nullptr && !entry.allowed.empty() &&
        std::find(entry.allowed.begin(), entry.allowed.end(), *s) == entry.allowed.end()) {
      return invalid_argument(
          fmt::format("{} = \"{}\": allowed: {}", where(node, entry.path), *s, fmt::join(entry.allowed, ", ")));
    }
    return *std::move(value);
  }

  Status load(const toml::table& from, const std::string& prefix) {
    for (const auto& [key, node] : from) {
      const std::string path = prefix + std::string(key.str());
      Entry* entry = table.find(path);
      if (entry != nullptr) {
        KTG_ASSIGN_OR_RETURN(Value value, value_of(*entry, node));
        accepted.emplace_back(entry, std::move(value));
      } else if (node.is_table()) {
        KTG_RETURN_IF_ERROR(load(*node.as_table(), path + "."));
      } else {
        return table.unknown_key(where(node, path), path);
      }
    }
    return ok_status();
  }

  void commit() {
    for (auto& [entry, value] : accepted) {
      entry->set = true;
      if (entry->rows != nullptr) {
        *entry->rows = std::get<std::vector<Row>>(std::move(value));
        continue;
      }
      std::visit([&v = value]<class T>(T* field) { *field = std::get<T>(std::move(v)); }, entry->field);
    }
  }
};

void ConfigTable::add(std::string path, Field field, std::string doc, std::vector<std::string> allowed) {
  KTG_CHECK(find(path) == nullptr) << path << " is registered twice";
  entries_.push_back({std::move(path), field, nullptr, {}, std::move(doc), std::move(allowed), false});
}

void ConfigTable::add_rows(std::string path, std::vector<Row>* rows, std::vector<std::string> keys, std::string doc) {
  KTG_CHECK(find(path) == nullptr) << path << " is registered twice";
  entries_.push_back({std::move(path), static_cast<bool*>(nullptr), rows, std::move(keys), std::move(doc), {}, false});
}

ConfigTable::Entry* ConfigTable::find(std::string_view path) {
  for (Entry& e : entries_) {
    if (e.path == path) return &e;
  }
  return nullptr;
}

Status ConfigTable::load_file(const std::string& path) {
  KTG_ASSIGN_OR_RETURN(const std::string text, FileSystem::posix().read_file(path));
  return load_text(text, path);
}

Status ConfigTable::load_text(std::string_view text, const std::string& origin) {
  try {
    const toml::table parsed = toml::parse(text, origin);
    Loader loader{*this, origin};
    KTG_RETURN_IF_ERROR(loader.load(parsed, ""));
    loader.commit();
    return ok_status();
  } catch (const toml::parse_error& e) {
    return invalid_argument(fmt::format("{}: {}", place(origin, e.source()), e.description()));
  }
}

Status ConfigTable::set(std::string_view assignment) {
  const size_t eq = assignment.find('=');
  if (eq == std::string_view::npos || eq == 0) {
    return invalid_argument(fmt::format("--set {}: want key=value", assignment));
  }
  const std::string key(assignment.substr(0, eq));
  const std::string value(assignment.substr(eq + 1));
  const std::string origin = kAssignment + std::string(assignment);
  const Entry* entry = find(key);
  if (entry == nullptr) return unknown_key(origin + ": " + key, key);  // before its value, which may be no TOML
  const bool wants_text = entry->rows == nullptr && std::holds_alternative<std::string*>(entry->field);
  const bool already_quoted = value.starts_with('"') || value.starts_with('\'');
  if (already_quoted || (!wants_text && is_toml_value(value))) return load_text(key + " = " + value, origin);
  if (!wants_text && (value.starts_with('[') || value.starts_with('{'))) {  // an array or table that was not closed
    return invalid_argument(fmt::format("{}: must be {}", origin, Loader::wanted(*entry)));
  }
  return load_text(key + " = " + quoted(value), origin);
}

Status ConfigTable::unknown_key(const std::string& where, std::string_view path) const {
  const std::string near = nearest(path);
  return invalid_argument(where + ": unknown key" +
                          (near.empty() ? std::string("; --help lists all") : "; did you mean '" + near + "'?"));
}

bool ConfigTable::was_set(std::string_view path) const {
  const auto it = std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.path == path; });
  return it != entries_.end() && it->set;
}

std::string ConfigTable::to_toml() const {
  const auto section_of = [](const Entry& e) {
    const size_t dot = e.path.rfind('.');
    return dot == std::string::npos ? std::string() : e.path.substr(0, dot);
  };
  std::vector<std::string> sections = {""};  // keys without a section come first: TOML has no way back to the top
  for (const Entry& e : entries_) {
    const std::string section = section_of(e);
    if (std::find(sections.begin(), sections.end(), section) == sections.end()) sections.push_back(section);
  }
  std::string out;
  for (const std::string& section : sections) {
    if (!section.empty()) out += (out.empty() ? "[" : "\n[") + section + "]\n";
    for (const Entry& e : entries_) {
      if (section_of(e) != section) continue;
      out += e.path.substr(section.empty() ? 0 : section.size() + 1) + " = " +
             (e.rows != nullptr ? rows_text(*e.rows) : to_text(e.field)) + "\n";
    }
  }
  return out;
}

std::string ConfigTable::help() const {
  std::string out;
  for (const Entry& e : entries_) {
    out += fmt::format("  {:<34} {:<12} {}", e.path, e.rows != nullptr ? rows_text(*e.rows) : to_text(e.field), e.doc);
    if (!e.allowed.empty()) out += fmt::format(" [{}]", fmt::join(e.allowed, " | "));
    out += "\n";
  }
  return out;
}

std::string ConfigTable::nearest(std::string_view path) const {
  std::string best;
  size_t best_distance = std::max<size_t>(3, path.size() / 3);
  for (const Entry& e : entries_) {
    const size_t whole = edit_distance(path, e.path);
    // A key given without, or under another, section still finds its name.
    const std::string_view leaf = std::string_view(e.path).substr(e.path.rfind('.') + 1);
    const std::string_view given_leaf = path.substr(path.rfind('.') + 1);
    const size_t distance = std::min(whole, edit_distance(given_leaf, leaf) + 1);
    if (distance < best_distance) {
      best_distance = distance;
      best = e.path;
    }
  }
  return best;
}

}  // namespace kintsugi
