/* Makes one call on a file below a folder fail: the SLM_NTH-th, with the error number SLM_ERRNO, or, if that is 0, by
   writing half of what it is to write. The call is told in the file SLM_TOLD. Loaded by LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static long calls;

/* 0: go on. 1: fail. */
static int fails(const char *name, const char *path) {
    char whole[PATH_MAX];
    const char *below = getenv("SLM_BELOW"), *nth = getenv("SLM_NTH");
    if (!below || !nth || !path) return 0;
    if (path[0] != '/') {
        if (!getcwd(whole, sizeof whole) || strlen(whole) + strlen(path) + 2 > sizeof whole) return 0;
        strcat(strcat(whole, "/"), path);
        path = whole;
    }
    if (strncmp(path, below, strlen(below)) || ++calls != atol(nth)) return 0;
    char line[PATH_MAX + 64];
    int length = snprintf(line, sizeof line, "%s %s\n", name, path);
    int told = syscall(SYS_openat, AT_FDCWD, getenv("SLM_TOLD"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    syscall(SYS_write, told, line, length);
    syscall(SYS_close, told);
    errno = atoi(getenv("SLM_ERRNO"));
    return 1;
}

static int fails_at(const char *name, int file) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(name, path);
}

#define REAL(type, name, ...) ((type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))
#define OPENS(name)                                                                       \
    int name(const char *path, int flags, ...) {                                          \
        va_list more;                                                                     \
        va_start(more, flags);                                                            \
        int mode = va_arg(more, int);                                                     \
        va_end(more);                                                                     \
        return fails("open", path) && errno ? -1 : REAL(int, #name, const char *, int, int)(path, flags, mode); \
    }
#define OF_A_FILE(type, name, more, given, ...) \
    type name(int file more) { return fails_at(#name, file) && errno ? -1 : REAL(type, #name, __VA_ARGS__)(file given); }
#define OF_A_PATH(name, more, given, ...) \
    int name(const char *path more) { return fails(#name, path) && errno ? -1 : REAL(int, #name, __VA_ARGS__)(path given); }
#define COMMA ,

OPENS(open)
OPENS(open64)
OF_A_FILE(int, fsync, , , int)
OF_A_FILE(int, ftruncate, COMMA off_t size, COMMA size, int, off_t)
OF_A_FILE(int, ftruncate64, COMMA off_t size, COMMA size, int, off_t)
OF_A_FILE(off_t, lseek, COMMA off_t at COMMA int from, COMMA at COMMA from, int, off_t, int)
OF_A_FILE(off_t, lseek64, COMMA off_t at COMMA int from, COMMA at COMMA from, int, off_t, int)
OF_A_FILE(int, flock, COMMA int how, COMMA how, int, int)
OF_A_FILE(ssize_t, read, COMMA void *data COMMA size_t size, COMMA data COMMA size, int, void *, size_t)
OF_A_PATH(mkdir, COMMA unsigned mode, COMMA mode, const char *, unsigned)
OF_A_PATH(unlink, , , const char *)
OF_A_PATH(rename, COMMA const char *to, COMMA to, const char *, const char *)

ssize_t write(int file, const void *data, size_t size) {
    if (fails_at("write", file)) {
        if (errno) return -1;
        size = (size + 1) / 2;
    }
    return REAL(ssize_t, "write", int, const void *, size_t)(file, data, size);
}
