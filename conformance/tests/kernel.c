/* What a kernel of a notebook does with its cells, as far as a launch sees it: lines on standard input say which library to
   load, and which of its functions to call. The lines are those of evcxr 0.22. */

#include <dlfcn.h>
#include <stdio.h>

int main(void) {
  char line[8192], library[4096], name[256];
  while (fgets(line, sizeof line, stdin)) {
    if (sscanf(line, "LOAD_AND_RUN %4095s %255s", library, name) != 2) {
      fprintf(stderr, "not understood: %s", line);
      return 99;
    }
    void *loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    void *(*function)(void *) = loaded ? (void *(*)(void *))dlsym(loaded, name) : NULL;
    if (!function) {
      fprintf(stderr, "not loaded: %s\n", dlerror());
      return 99;
    }
    function(NULL);
    puts("the cell has ended");
  }
  return 0;
}
