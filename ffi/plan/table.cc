#include "table.h"

namespace jnvfp4 {

std::string dotted(int capability) { return std::to_string(capability / 10) + "." + std::to_string(capability % 10); }

std::string device_text(int capability) {
  return capability == kCpu ? "the CPU" : "compute capability " + dotted(capability);
}

std::string wrong_device(std::string_view kernel, int least, int most, const Device& device) {
  const int capability = device.capability;
  if (capability < least || capability > most) {
    const char* which = most == kCpu ? "" : most == kNewest ? "GPUs from " : "GPUs of ";
    const std::string last = most == least || most == kNewest ? "" : " to " + dotted(most);
    return std::string(kernel) + " runs on " + which + device_text(least) + last + ", not on " +
           device_text(capability);
  }
  if (least == kHopper && !device.sm90a)
    return std::string(kernel) + " is not in this build; build jnvfp4 with 90a among JNVFP4_CUDA_TARGETS";
  return {};
}

std::string no_plan(std::string_view planned, int64_t scratch, const Device& device, const std::string& cause) {
  return "the program was lowered for the kernel " + std::string(planned) + " with " + std::to_string(scratch) +
         " bytes of scratch, which " + device_text(device.capability) + " cannot run (" + cause +
         "); lower it again for this device";
}

}  // namespace jnvfp4
