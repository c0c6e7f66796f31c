#include "checkpoint/history.h"

#include <algorithm>
#include <tuple>

#include "checkpoint/find.h"
#include "checkpoint/json_fields.h"
#include "checkpoint/step_folder.h"

namespace kintsugi::checkpoint {
namespace {

constexpr const char* kHistoriesFormat = "kintsugi-histories";

bool knows(const std::vector<History>& histories, const std::string& run_id) {
  return std::any_of(histories.begin(), histories.end(), [&](const History& h) { return h.run_id == run_id; });
}

// Adds a history and makes it durable.
Result<History> begin_history(FileSystem& fs, const std::string& checkpoint_dir, std::vector<History> histories,
                              History fresh) {
  if (fresh.run_id.empty()) return invalid_argument("run_id is empty");
  if (knows(histories, fresh.run_id)) {
    return invalid_argument("run_id " + fresh.run_id + ": " + checkpoint_dir + " already has a history of that name");
  }
  histories.push_back(fresh);
  KTG_RETURN_IF_ERROR(fs.create_dirs(checkpoint_dir));
  KTG_RETURN_IF_ERROR(write_histories(fs, checkpoint_dir, histories));
  return fresh;
}

}  // namespace

Result<std::vector<History>> read_histories(FileSystem& fs, const std::string& checkpoint_dir) {
  const std::string path = join_path(checkpoint_dir, kHistoriesFile);
  KTG_ASSIGN_OR_RETURN(const std::string text, fs.read_file(path));
  const auto json = unseal_json(text);
  if (!json.ok()) return json.status().with_context(path);
  std::string format;
  int64_t version = 0;
  JsonFields fields(*json, path);
  fields.get("format", format);
  fields.get("version", version);
  const Json& array = fields.get_array("histories");
  KTG_RETURN_IF_ERROR(fields.finish());
  if (format != kHistoriesFormat || version != 1)
    return data_loss(path + ": format \"" + format + "\", version " + std::to_string(version));
  std::vector<History> histories;
  for (const Json& element : array) {
    History history;
    JsonFields members(element, path);
    members.get("run_id", history.run_id);
    members.get("parent_run_id", history.parent_run_id);
    members.get("parent_step", history.parent_step);
    KTG_RETURN_IF_ERROR(members.finish());
    histories.push_back(std::move(history));
  }
  return histories;
}

Status write_histories(FileSystem& fs, const std::string& checkpoint_dir, const std::vector<History>& histories) {
  Json array = Json::array();
  for (const History& history : histories) {
    array.push_back(
        {{"run_id", history.run_id}, {"parent_run_id", history.parent_run_id}, {"parent_step", history.parent_step}});
  }
  KTG_ASSIGN_OR_RETURN(const std::string text,
                       seal_json({{"format", kHistoriesFormat}, {"version", 1}, {"histories", array}}));
  return write_file_durably(fs, checkpoint_dir, kHistoriesFile, text);
}

std::vector<History> histories_of(const std::vector<CheckpointInfo>& checkpoints) {
  std::vector<const CheckpointInfo*> order;
  for (const CheckpointInfo& info : checkpoints) order.push_back(&info);
  std::sort(order.begin(), order.end(), [](const CheckpointInfo* a, const CheckpointInfo* b) {
    return std::tie(a->history_index, a->meta.step) < std::tie(b->history_index, b->meta.step);
  });
  std::vector<History> histories;
  for (const CheckpointInfo* info : order) {
    const CheckpointMeta& meta = info->meta;
    if (!knows(histories, meta.run_id)) histories.push_back({meta.run_id, meta.parent_run_id, meta.parent_step});
  }
  return histories;
}

std::map<std::string, int64_t> lineage(const std::vector<History>& histories) {
  std::map<std::string, int64_t> limits;
  if (histories.empty()) return limits;
  std::string run_id = histories.back().run_id;
  int64_t limit = INT64_MAX;
  while (limits.emplace(run_id, limit).second) {  // ends at a run that is there already, should a file claim a circle
    const auto at =
        std::find_if(histories.begin(), histories.end(), [&](const History& h) { return h.run_id == run_id; });
    if (at == histories.end() || at->parent_run_id.empty()) break;
    run_id = at->parent_run_id;
    limit = std::min(limit, at->parent_step);
  }
  return limits;
}

Result<History> start_history(FileSystem& fs, const std::string& checkpoint_dir, const std::string& run_id) {
  KTG_ASSIGN_OR_RETURN(Scan scan, scan_checkpoints(fs, checkpoint_dir));
  return begin_history(fs, checkpoint_dir, std::move(scan.histories), {run_id, "", 0});
}

Result<History> resume_history(FileSystem& fs, const std::string& checkpoint_dir, const CheckpointInfo& resumed,
                               const std::string& fresh_run_id) {
  KTG_ASSIGN_OR_RETURN(Scan scan, scan_checkpoints(fs, checkpoint_dir));
  const std::vector<CheckpointInfo> newest_line = newest_history(scan);
  if (!newest_line.empty()) {
    const CheckpointMeta& newest = newest_line.front().meta;
    if (newest.run_id == resumed.meta.run_id && newest.step == resumed.meta.step) {
      // Not newest.run_id: a history that was begun here and has saved nothing yet goes on as well.
      const History current = scan.histories.back();
      if (!scan.histories_on_disk) KTG_RETURN_IF_ERROR(write_histories(fs, checkpoint_dir, scan.histories));
      return current;
    }
  }
  return begin_history(fs, checkpoint_dir, std::move(scan.histories),
                       {fresh_run_id, resumed.meta.run_id, resumed.meta.step});
}

}  // namespace kintsugi::checkpoint
