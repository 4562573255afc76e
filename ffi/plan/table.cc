#include "table.h"

namespace jnvfp4 {

std::string dotted(int capability) { return std::to_string(capability / 10) + "." + std::to_string(capability % 10); }

std::string device_text(int capability) {
  return capability == kCpu ? "the CPU" : "compute capability " + dotted(capability);
}

std::string wrong_device(std::string_view kernel, const Devices& devices, const Device& device) {
  const auto [least, most, needs] = devices;
  if (!devices.include(device.capability)) {
    const char* which = most == kCpu ? "" : most == kNewest ? "GPUs from " : "GPUs of ";
    const std::string last = most == least || most == kNewest ? "" : " to " + dotted(most);
    return std::string(kernel) + " runs on " + which + device_text(least) + last + ", not on " +
           device_text(device.capability);
  }
  const auto words = [](std::string_view text) { return std::string(" ").append(text).append(" "); };
  const bool built = words(device.built_for).find(words(std::string("sm_").append(needs))) != std::string::npos;
  if (needs.empty() || device.built_for.empty() || built) return {};
  return std::string(kernel) + " is not in this build; build jnvfp4 with " + std::string(needs) +
         " among JNVFP4_CUDA_TARGETS";
}

std::string no_plan(std::string_view planned, int64_t scratch, const Device& device, const std::string& cause) {
  return "the program was lowered for the kernel " + std::string(planned) + " with " + std::to_string(scratch) +
         " bytes of scratch, which " + device_text(device.capability) + " cannot run (" + cause +
         "); lower it again for this device";
}

}  // namespace jnvfp4
